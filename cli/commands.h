/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl's verbs, each in the file named behind it. */
#ifndef EMBER_CLI_COMMANDS_H
#define EMBER_CLI_COMMANDS_H

#include "base/verbs.h"

int run_load(const struct verb_call *call); /* models.c */
int run_unload(const struct verb_call *call);
int run_models(const struct verb_call *call);
int run_spawn(const struct verb_call *call); /* instances.c */
int run_stop(const struct verb_call *call);
int run_ps(const struct verb_call *call);
int run_status(const struct verb_call *call);
int run_generate(const struct verb_call *call); /* generate.c */
int run_verify(const struct verb_call *call);   /* verify.c */
int run_verify_template(const struct verb_call *call);
int run_verify_tokenizer(const struct verb_call *call); /* verify_text.c */
int run_cache_ls(const struct verb_call *call);         /* cache.c */
int run_cache_show(const struct verb_call *call);
int run_cache_verify(const struct verb_call *call);
int run_cache_gc(const struct verb_call *call);
int run_cache_export(const struct verb_call *call);
int run_cache_import(const struct verb_call *call);
int run_bench_spawn(const struct verb_call *call);   /* bench_spawn.c */
int run_bench_load(const struct verb_call *call);    /* bench_load.c */
int run_bench_kernels(const struct verb_call *call); /* bench_kernels.c */
int run_bench_decode(const struct verb_call *call);  /* bench_decode.c */
int run_bench_prefill(const struct verb_call *call);
int run_pack(const struct verb_call *call);
int run_pack_verify(const struct verb_call *call);
int run_bench_grammar(const struct verb_call *call); /* bench_grammar.c */
int run_bench_serve(const struct verb_call *call);   /* bench_serve.c */
int run_perplexity(const struct verb_call *call);    /* perplexity.c */
int run_synth(const struct verb_call *call);         /* synth.c */
int run_demo(const struct verb_call *call);          /* demo.c */

#endif
