#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_samples.py SAMPLE: what the grammars allow, judged by a validator that is not ours.

Texts are drawn as a model without sense would write them at any temperature, over the tokens of
ember-tiny and, where they are there, of a real tokenizer. Each that has ended must parse and
validate; each that was cut must be the beginning of one that does (it never says it has ended).
"""
import json
import os
import random
import re
import subprocess
import sys
import unittest

from schemas import INTEGER, NUMBER, SCHEMAS, STRING, judge, jsonschema, obj

if not jsonschema:
    print("skipped: no python3-jsonschema")
    sys.exit(77)

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
SHARED = os.environ.get("EMBER_SHARED", os.path.join(SOURCE, "..", "shared"))
TOKENIZERS = [os.path.join(SOURCE, "models", "ember-tiny")] + [
    path for path in (os.path.join(SHARED, "tokenizers", name, "tokenizer.json.xz")
                      for name in ("llama2", "qwen3")) if os.path.exists(path)]
SAMPLE = sys.argv.pop(1)
N = int(os.environ.get("GRAMMAR_SAMPLES", "24"))


FORMATS = ["date", "time", "date-time", "duration", "uuid", "email", "ipv4", "ipv6", "hostname", "uri",
           "uri-reference", "iri", "iri-reference", "json-pointer",
           "vendor-specific"]  # not relative-json-pointer: the validator takes 207 for a number with a zero in front

REFUSED = {
    "#/properties/a/not": obj(a={"not": STRING}),
    "#/if": {"if": STRING, "then": {}},
    "#/items/contains": {"type": "array", "items": {"type": "array", "contains": {}}},
    "#/uniqueItems": {"type": "array", "uniqueItems": True},
    "#/properties/x/multipleOf": obj(x={"type": "number", "multipleOf": 0.01}),
    "#/oneOf": {"oneOf": [INTEGER, NUMBER]},
    "#/dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "#/$ref": {"$ref": "https://elsewhere.example/x.json"},
    "#/type": {"type": "text"},
    "#/pattern": {"type": "string", "pattern": "(?=a)b"},
    "#/properties/p/pattern": obj(p={"type": "string", "pattern": "(a)\\1"}),
    "#/format": {"type": "string", "format": "idn-email"},
    "no text at all": {"type": "integer", "minimum": 5, "maximum": 3},
    "no text at all ": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "nested too deeply": json.loads('{"items":' * 400 + "{}" + "}" * 400),
}

# Hostile ones: an error or an answer, soon.
HOSTILE = [
    ("regex", "(((a{1000}){1000}){1000}){1000}"),
    ("regex", "(a|b)*a(a|b){30}"),
    ("regex", "(" * 5000),
    ("regex", "((a*)*)*b"),
    ("regex", "(x{0,99999}){0,99999}y"),
    ("regex", "[^\\x00-\\x7f]{1,500}[a-z]{1,500}" * 20),
    ("rules", "root ::= a\na ::= b \"x\" | \"y\"\nb ::= a"),
    ("rules", "root ::= root"),
    ("rules", "root ::= " + "(" * 3000),
    ("rules", "root ::= \"a\" root \"b\""),
    ("rules", "root ::= \"a\" root \"x\" | \"a\" root \"y\" | \"a\""),
    ("rules", "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + "\nr60 ::= \"a\"\nroot ::= r0"),
    ("rules", "root ::= (\"a\"* \"a\"* \"a\"*)* \"b\""),
    ("schema", {"anyOf": [{"type": "string", "minLength": i, "maxLength": 3000 + i} for i in range(300)]}),
    ("schema", {"type": "string", "maxLength": 10 ** 9, "minLength": 10 ** 8}),
    ("schema", {"type": "array", "maxItems": 10 ** 9, "items": {"type": "array", "minItems": 50, "maxItems": 10 ** 6}}),
    ("schema", {"allOf": [{"anyOf": [{"minLength": i * j} for i in range(10)]} for j in range(12)], "type": "string"}),
    ("schema", {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}, "type": "object"}),
    ("schema", {"type": "object", "maxProperties": 500, "properties": {f"p{i}": {} for i in range(500)}}),
    ("schema", {"enum": [f"word {i} {i * i}" for i in range(20000)]}),
    ("schema", {"$ref": "#"}),
    ("schema", {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    ("schema", {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}),
    ("choice", ["a" * 300000, "b" * 300000]),
]

REGEXES = ["abc", "a*b+c?", "(ab|cd){2,3}", "[a-c]*[^a-c]", "a{0,3}b{2,}", "(a|b)*abb", "x?y?z?", ".b.", "(a*b)*",
           "a|", "[\\d.]+", "\\w+@\\w+", "(?:a|(?P<n>b))c", "a.*b", "\\[a\\]", "a{2}", "(a{2,4}){2}", "^ab$",
           "(^a|b)c", "[a-]+", "\\.\\*", "a+?b*?", "[^\\W\\d]+", "\\x41\\u0042", "é+", "(a{0,30}b){0,30}", "a{100,200}"]

CALC = """
?start: sum
?sum: product | sum "+" product -> add | sum "-" product
?product: atom
    | product "*" atom -> mul
?atom: NUMBER -> number
     | "-" atom | NAME | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
%ignore " "
"""
SQL = r'''
root ::= "SELECT " columns " FROM " table (" WHERE " condition)? ";"
columns ::= "*" | column (", " column)*   # a comment
column ::= [a-z_]+
table ::= [a-z]{3,10}
condition ::= column " = " ( number | "'" [^'\n]{0,20} "'" )
number ::= "-"? ("0" | [1-9] [0-9]{0,5})
'''


class Sampler:
    def __init__(self, tokenizer):
        self.process = subprocess.Popen([SAMPLE, tokenizer], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def ask(self, kind, spec, **more):
        line = json.dumps(dict(more, kind=kind, spec=spec)) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        reply["texts"] = [t.encode("latin-1") for t in reply["texts"]]
        return reply

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


class Samples(unittest.TestCase):
    def setUp(self):
        self.samplers = [Sampler(t) for t in TOKENIZERS]

    def tearDown(self):
        for s in self.samplers:
            self.assertEqual(s.close(), 0)

    def each(self, kind, spec, n=N, **more):
        """Texts that ended, some at least; all of them begin right."""
        ended = []
        for k, sampler in enumerate(self.samplers):
            some = n if k == 0 else 3
            reply = sampler.ask(kind, spec, samples=some, seed=k + 1, **more)
            self.assertNotIn("error", reply, (spec, reply.get("error")))
            self.assertFalse([t for t in reply["texts"] if b"<<dead end>>" in t], spec)
            ended += [t.decode() for t, e in zip(reply["texts"], reply["ended"]) if e]
        self.assertTrue(ended or spec is SCHEMAS["pattern within"], (spec, "none has ended"))
        return ended

    def test_schemas(self):
        total = 0
        for name, schema in SCHEMAS.items():
            with self.subTest(name):
                texts = self.each("schema", schema)
                for text in texts:
                    judge(schema, text)
                total += len(texts)
        print(f"{total} texts of {len(SCHEMAS)} schemas are valid")
        self.assertGreater(total, len(SCHEMAS) * N // 2)

    def test_formats(self):
        for name in FORMATS:
            with self.subTest(name):
                schema = {"type": "string", "format": name}
                for text in self.each("schema", schema):
                    judge(schema, text)

    def test_white_space(self):
        schema = obj(a=INTEGER, b={"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2})
        for text in self.each("schema", schema, compact=True):
            self.assertEqual(text, json.dumps(json.loads(text)))
        for text in self.each("schema", schema, whitespace=""):
            self.assertEqual(text, json.dumps(json.loads(text), separators=(",", ":")))
        reply = self.samplers[0].ask("schema", schema, whitespace="[ x]")
        self.assertIn("white space", reply["error"])

    def test_json_object(self):
        for text in self.each("json_object", None):
            self.assertIsInstance(json.loads(text), dict)

    def test_refused(self):
        for where, schema in REFUSED.items():
            with self.subTest(where):
                reply = self.samplers[0].ask("schema", schema)
                self.assertIn(where.strip(), reply.get("error", "no error"))

    def test_regexes(self):
        rng = random.Random(7)
        for pattern in REGEXES:
            with self.subTest(pattern):
                compiled = re.compile(pattern, re.ASCII)
                tries = ["".join(rng.choice("aabbcdxyz@.-[]é1A_\n") for _ in range(rng.randrange(9)))
                         for _ in range(300)]
                texts = self.each("regex", pattern, match=[])
                for text in texts:
                    self.assertTrue(compiled.fullmatch(text), text)
                reply = self.samplers[0].ask("regex", pattern, match=tries + texts)
                for text, ours in zip(tries + texts, reply["match"]):
                    if text.isascii() or "[^" not in pattern:
                        self.assertEqual(ours, bool(compiled.fullmatch(text)), text)

    def test_white_space_that_is_none_for_some(self):
        """Python's \\s has \\x1c to \\x1f, JavaScript's has not: what is made is right for both."""
        texts = ["\x1c", "\x1f", "\x0b", " ", "a"]
        for pattern, want in (("\\s", "FFTTF"), ("\\S", "FFFFT"), ("[\\s]", "FFTTF"), ("[\\S]", "FFFFT"),
                              ("[^\\s]", "FFFFT"), ("[^\\S]", "FFTTF"), ("[^\\s\\d]", "FFFFT")):
            with self.subTest(pattern):
                reply = self.samplers[0].ask("regex", pattern, match=texts)
                self.assertEqual("".join("FT"[m] for m in reply["match"]), want)
        self.assertIn("error", self.samplers[0].ask("regex", "[^\\s\\S]"))

    def test_bad_regexes(self):
        for pattern in ["a(", "a)", "[b-a]", "*a", "a{3,2}", "\\1", "a(?!b)", "\\p{L}", "a\\bb", "[", "(?i)a", "a*+", "\\q",
                        "a{,2}", "a{,}"]:
            with self.subTest(pattern):
                self.assertIn("error", self.samplers[0].ask("regex", pattern))

    def test_rules(self):
        for text in self.each("rules", SQL):
            self.assertRegex(text, r"\ASELECT (\*|[a-z_]+(, [a-z_]+)*) FROM [a-z]{3,10}"
                                   r"( WHERE [a-z_]+ = (-?(0|[1-9][0-9]{0,5})|'[^'\n]{0,20}'))?;\Z")
        for text in self.each("rules", CALC):
            self.assertRegex(text, r"\A[-+*()A-Za-z0-9_. ]+\Z")
            self.assertEqual(text.count("("), text.count(")"))
        balanced = 'root ::= "a" root "b" | "c"'
        match = ["c", "acb", "aacbb", "aacb", "", "acbb", "ab"]
        reply = self.samplers[0].ask("rules", balanced, match=match)
        self.assertEqual(reply["match"], [True, True, True, False, False, False, False])
        calc = {"1": True, "1+2*(3-x)": True, "1 + 2": True, "-x": True, "1++2": False, "(1": False,
                "1 2": False, "": False, "a*b*c": True}
        reply = self.samplers[0].ask("rules", CALC, match=list(calc))
        self.assertEqual(dict(zip(calc, reply["match"])), calc)
        ambiguous = 'root ::= "a" root "x" | "a" root "y" | "a"'
        texts = {"a" * 20 + "xy" * 9 + "x": True, "a" * 20 + "xy" * 9 + "z": False, "a" * 20: False}
        reply = self.samplers[0].ask("rules", ambiguous, match=list(texts))
        self.assertEqual(dict(zip(texts, reply["match"])), texts)

    def test_bad_rules(self):
        for rules, why in [('root ::= "a', "closing quote"), ('root ::= x', "not defined"), ('x ::= "a"', "root"),
                           ('root ::= (=a) b', "not supported"), ('a: "x"', "start"), ('start: a{b}', "templates"),
                           ('root ::= x\nx ::= y "a"\ny ::= x "b" | "c"', "begin with itself"),
                           ('root ::= "a"\nroot ::= "b"', "line 2"), ('start: %ignore', "expected"),
                           ('start: "a"\n%import python.X', "only `common`")]:
            with self.subTest(rules):
                self.assertIn(why, self.samplers[0].ask("rules", rules).get("error", "no error"))

    def test_choices(self):
        words = ["yes", "no", "yesterday", "é\"x"]
        self.assertEqual(set(self.each("choice", words, n=80)), set(words))
        self.assertIn("empty", self.samplers[0].ask("choice", ["a", ""])["error"])
        self.assertIn("error", self.samplers[0].ask("choice", []))

    def test_hostile(self):
        for kind, spec in HOSTILE:
            with self.subTest(str(spec)[:60]):
                reply = self.samplers[0].ask(kind, spec, samples=2, seed=5, limit=60)
                self.assertFalse([t for t in reply["texts"] if b"<<dead end>>" in t])


unittest.main(verbosity=1)
