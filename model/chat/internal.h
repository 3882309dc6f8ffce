/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of this folder share: families as data, the parser's state, steps of bodies. */
#ifndef EMBER_MODEL_CHAT_INTERNAL_H
#define EMBER_MODEL_CHAT_INTERNAL_H

#include "model/chat/chat.h"
#include "model/chat/scan.h"

/* How the call itself is written between its markers. */
enum body {
    BODY_JSON,  /* {"name": ..., "arguments": {...}}, or a list of them */
    BODY_NAMED, /* name, separator, {...} */
    BODY_XML,   /* name, then keys and values in tags */
    BODY_ARGS,  /* {...} alone: the name is known */
    BODY_HARMONY
};

struct family {
    enum body body;
    const char *section_open, *section_close; /* around several calls; NULL: none */
    const char *call_open, *call_close;       /* call_close NULL: the body has it */
    const char *separator;                    /* NAMED */
    /* XML; a name or key that ends at a quote is followed by attributes and ">" */
    const char *name_end, *key_open, *key_end, *value_open, *value_close, *function_close;
    bool bare;           /* a call may begin where the text does, without a marker */
    bool loose;          /* call_open counts outside a section, for names that are known */
    bool ends_reasoning; /* its opening marker is a token of its own: it ends thinking */
};
const struct family *chat_family(enum chat_tools tools); /* NULL: NONE */

/* What stands around thoughts; NULLs: NONE. */
struct thought {
    const char *open, *close;
};
const struct thought *chat_thought(enum chat_reasoning reasoning);
bool chat_is_harmony(struct chat_form form);

#define NAME_MAX_LEN 256

enum state {
    S_REASON_START,
    S_REASON,
    S_CONTENT,
    S_SECTION, /* in a section, between calls */
    S_CALL,
    S_AFTER,  /* behind a call: its end marker may come */
    S_IGNORE, /* the one call that was wanted has come */
    S_HEADER, /* harmony: until <|message|> */
    S_MESSAGE,
    S_MESSAGE_CALL,
    S_MESSAGE_END /* harmony, behind a call's arguments */
};

/* The call that is being read. Offsets are into the parser's `in`. */
struct call {
    unsigned stage;
    bool begun;  /* live: the sink knows it */
    bool given;  /* its arguments have come */
    bool strict; /* only names that are known */
    bool json;   /* it is one object, or a list of them */
    bool list, fenced, name_known;
    enum { KEY_OTHER, KEY_NAME, KEY_ARGUMENTS } key_kind;
    int typed; /* DSML: -1 not said, 0 string="false", 1 string="true" */
    unsigned n_keys;
    size_t at, stream_at; /* of a key or value; of arguments not sent yet, SIZE_MAX: none */
    struct scan scan;
    struct buffer name, id, key, args;
};

struct chat_parser {
    struct chat_options o;
    struct chat_sink sink;
    const struct family *family; /* NULL: no calls */
    const struct thought *thought;
    enum state state;
    struct buffer in; /* in[0..mark) is done with; [mark..pos) is read and not decided */
    size_t pos, mark;
    struct buffer blank[2]; /* white space that waits for text behind it, per channel */
    bool said[2], trim[2];
    bool started;    /* bare: the text's beginning is past */
    bool in_section; /* end markers that come astray are dropped */
    bool section_used;
    enum chat_channel channel; /* harmony */
    unsigned n_whole, n_index;
    struct call call;
};

enum step { STEP_MORE, STEP_OK, STEP_BAD };
enum answer { NO, YES, MAYBE };

/* ---- parser.c ---- */

void chat_append(struct buffer *out, const void *bytes, size_t n); /* aborts without memory */
void chat_say(struct chat_parser *p, enum chat_channel channel, const char *text, size_t len);
/* Whether `word` stands at `at`; MAYBE: the text ends within it, and more may come. */
enum answer chat_at(const struct chat_parser *p, size_t at, const char *word, bool end);
/* The first of some words (NULLs are skipped) at or behind pos: its index, or -1 and *ret_at where
 * one may begin at the end of the text. */
int chat_find(const struct chat_parser *p, const char *const *words, size_t n, bool end,
              size_t *ret_at);
size_t chat_skip_blank(const struct chat_parser *p, size_t at);
bool chat_is_blank(char c);
/* Takes blanks off both ends. */
void chat_trim(const char **s, size_t *n);
/* The client's function of that name; NULL: there is none. */
const json_t *chat_function(const struct chat_parser *p, const char *name);
void chat_call_reset(struct chat_parser *p);
/* More of the arguments' JSON; live: the call begins with the first. */
void chat_arguments(struct chat_parser *p, const char *text, size_t len);
/* The call is whole: it and what was held of it goes out. */
void chat_call_whole(struct chat_parser *p);
/* It is none: what was read of it is content. */
void chat_call_broken(struct chat_parser *p);

/* ---- bodies: read on from p->pos; BAD leaves pos where it went wrong ---- */

enum step chat_body_json(struct chat_parser *p);            /* calls_json.c */
enum step chat_body_object(struct chat_parser *p);          /* one object of arguments */
enum step chat_body_named(struct chat_parser *p, bool end); /* calls_named.c */
enum step chat_body_xml(struct chat_parser *p, bool end);   /* calls_xml.c */
bool chat_step_harmony(struct chat_parser *p, bool end);    /* harmony.c */
void chat_start_harmony(struct chat_parser *p);

#endif
