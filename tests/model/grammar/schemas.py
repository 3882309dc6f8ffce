# SPDX-License-Identifier: Apache-2.0
"""Schemas of every kind, for tests that make texts of them, and the judge of such texts."""
import json

try:
    import jsonschema
except ImportError:
    jsonschema = None


def obj(required=None, **properties):
    return {"type": "object", "properties": properties,
            "required": list(properties) if required is None else required}


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
PERSON = {
    "$defs": {"address": obj(street=STRING, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
              "person": obj(["name"], name=STRING, home={"$ref": "#/$defs/address"},
                            children={"type": "array", "items": {"$ref": "#/$defs/person"},
                                      "maxItems": 3})},
    "$ref": "#/$defs/person"}
TREE = {"$id": "https://example.com/tree", "type": "object",
        "properties": {"value": INTEGER, "left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
                       "right": {"oneOf": [{"$ref": "https://example.com/tree"}, {"type": "null"}]}},
        "required": ["value", "left", "right"]}

SCHEMAS = {
    "anything": True,
    "empty": {},
    "string": STRING,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean or null": {"type": ["boolean", "null"]},
    "string or number": {"type": ["string", "number"]},
    "object": {"type": "object"},
    "array": {"type": "array"},
    "named": obj(a=INTEGER, b=STRING, c={"type": "boolean"}),
    "optional": obj([], a=INTEGER, b=STRING, c={"type": "null"}),
    "some required": obj(["b", "d"], a=INTEGER, b=INTEGER, c=INTEGER, d=INTEGER, e=INTEGER),
    "closed": dict(obj(["a"], a=INTEGER, b=INTEGER), additionalProperties=False),
    "open": dict(obj(["a"], a=INTEGER), additionalProperties=True),
    "open typed": dict(obj(["a"], a=STRING, ab={"type": "null"}), additionalProperties=INTEGER),
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}},
    "required, unnamed": {"type": "object", "required": ["x", "y"]},
    "quotes in names": obj(**{'a"b': INTEGER, "c\\d": STRING, "é": STRING, "\n": INTEGER}),
    "pattern properties": {"type": "object", "patternProperties": {"^x_": INTEGER, "_y$": STRING},
                           "properties": {"x_1": {"minimum": 3}, "z": STRING},
                           "required": ["x_1"], "additionalProperties": {"type": "boolean"}},
    "pattern properties only": {"type": "object", "additionalProperties": False,
                                "patternProperties": {"^[a-z]{1,3}$": STRING}, "minProperties": 1},
    "property names": {"type": "object", "propertyNames": {"pattern": "^[A-Z]+$", "maxLength": 4},
                       "additionalProperties": INTEGER},
    "property names of no type that names have": {"type": "object", "propertyNames": {"type": "null"},
                                                  "additionalProperties": INTEGER},
    "at least one": {"type": "object", "minProperties": 1, "maxProperties": 2,
                     "additionalProperties": STRING},
    "two of four": dict(obj([], a=INTEGER, b=INTEGER, c=INTEGER, d=INTEGER),
                        minProperties=2, maxProperties=3),
    "enum": {"enum": ["red", "green", 7, 2.5, None, True, {"a": [1, "x"]}, ["y"], "é\n\"\\"]},
    "enum of a type": {"type": "string", "enum": ["red", 1, "green"], "minLength": 4},
    "enum beside a format": {"type": "string", "format": "date", "enum": ["never", "2024-05-01", ""]},
    "enum beside formats of which one": {"enum": ["x", "2024-05-01", "2024-05-01T00:00:00Z", 1],
                                         "oneOf": [{"type": "string", "format": "date"}, INTEGER]},
    "enum beside any format": {"enum": ["a@b.example", "::1", "no"],
                               "anyOf": [{"format": "ipv6"}, {"format": "email"}]},
    "const": {"const": {"kind": "point", "at": [1, 2]}},
    "minmax": {"type": "integer", "minimum": 13, "maximum": 1027},
    "negative": {"type": "integer", "minimum": -120, "exclusiveMaximum": -7},
    "across zero": {"type": "integer", "exclusiveMinimum": -3, "maximum": 30},
    "at least": {"type": "integer", "minimum": 100},
    "at most": {"type": "integer", "maximum": 7},
    "fractions": {"type": "number", "minimum": 0.25, "maximum": 1.5},
    "open fractions": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "small": {"type": "number", "minimum": -0.001, "maximum": 0.001},
    "positive": {"type": "number", "exclusiveMinimum": 0},
    "below": {"type": "number", "exclusiveMaximum": -2.5},
    "tenths": {"type": "number", "minimum": 0.1, "maximum": 0.3},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 50, "maximum": 5000},
    "multiples of both": {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "number"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 7},
    "long": {"type": "string", "minLength": 200, "maxLength": 230},
    "exactly": {"type": "string", "minLength": 5, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3,5}$"},
    "pattern within": {"type": "string", "pattern": "ab+c"},
    "pattern of escapes": {"type": "string", "pattern": "^[\"\\\\\\n/]{2,5}$"},
    "pattern, alternatives": {"type": "string", "pattern": "^(foo|bar)$|^x{3}|y$"},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 9},
    "two patterns": {"allOf": [{"pattern": "^[a-f]+$"}, {"pattern": "ce"}], "type": "string",
                     "maxLength": 12},
    "not in class": {"type": "string", "pattern": "^[^a-z\\s]{3}$"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "many items": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 60, "maxItems": 64},
    "tuple": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
    "open tuple": {"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "null"},
                   "minItems": 1, "maxItems": 5},
    "long tuple": {"type": "array", "prefixItems": [INTEGER], "minItems": 3},
    "one of one": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": INTEGER},
    "any of": {"anyOf": [obj(a=INTEGER), obj(b=STRING), {"type": "string", "maxLength": 3}]},
    "one of by const": {"oneOf": [obj(kind={"const": "a"}, x=INTEGER),
                                  obj(kind={"const": "b"}, x=STRING, y=NUMBER)]},
    "one of by names": {"oneOf": [obj(a=INTEGER), obj(b=INTEGER)]},
    "one of types": {"oneOf": [STRING, INTEGER, {"type": "array", "items": INTEGER}]},
    "one of by reference": {"$defs": {"cat": obj(t={"enum": ["cat"]}), "dog": obj(t={"enum": ["dog"]})},
                            "type": "array", "minItems": 1, "items": {
                                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}},
    "all of": {"allOf": [obj(a=INTEGER), obj(a={"minimum": 4}, b=STRING),
                         {"properties": {"b": {"maxLength": 3}}}]},
    "any within all": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"],
                       "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]},
                                 {"properties": {"c": {"const": 2}}, "required": ["c"]}]},
    "person": PERSON,
    "tree": TREE,
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": INTEGER},
                "type": "array", "items": [{"$ref": "#/definitions/n"}, STRING],
                "additionalItems": {"type": "boolean"}, "minItems": 2},
    "pointer escapes": {"$defs": {"a/b": {"c~d": INTEGER}}, "$ref": "#/$defs/a~1b/c~0d"},
    "anchor": {"$defs": {"x": {"$anchor": "here", "type": "boolean"}}, "$ref": "#here"},
    "annotations": {"title": "t", "description": "d", "default": 3, "examples": [1], "type": "integer",
                    "$comment": "c", "deprecated": True, "readOnly": True, "x-own": {"not": {}}},
    "properties called not": obj(**{"not": INTEGER, "if": STRING}),
    "evaluated": dict(obj(a=INTEGER), unevaluatedProperties=False, allOf=[obj(b=INTEGER)]),
}


def judge(schema, text):
    """Raises unless the text is JSON that satisfies the schema, formats included."""
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = getattr(cls, "FORMAT_CHECKER", None) or jsonschema.draft202012_format_checker
    cls(schema, format_checker=checker).validate(json.loads(text))
