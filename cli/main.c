/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl: the table of its verbs. What each does is in the file that cli/commands.h names. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/perplexity_run.h"
#include "cli/quant_options.h"
#include "model/model.h"

static const struct verb_option globals[] = {
    {"json", VALUE_BOOL, .help = "print JSON"},
    {"socket", VALUE_PATH,
     .help = "emberd's socket (default: EMBER_SOCKET, else where emberd puts it)"},
    {0}};

static const struct verb_option load_options[] = {
    {"name", VALUE_STRING, .help = "serve it under this name instead of the folder's"},
    {"standby", VALUE_INT, .limits = "0..256", .help = "warm instances to keep ready"},
    {"kv-bytes", VALUE_BYTES, .fallback = "0",
     .help = "KV memory of each instance; 0: the daemon's setting"},
    CLI_QUANT_OPTIONS,
    {"kv-type", VALUE_ENUM, .limits = KV_CHOICES,
     .help = "what its K and V are kept in (default: the daemon's setting)"},
    {"detach", VALUE_BOOL, .help = "do not wait; the load goes on in the daemon"},
    {0}};
static const struct verb_option unload_options[] = {
    {"force", VALUE_BOOL, .help = "end its leases too"}, {0}};
static const struct verb_option spawn_options[] = {
    {"ttl", VALUE_DURATION, .fallback = "0",
     .help = "how long the lease waits for its driver; 0: the daemon's setting"},
    {"holder", VALUE_STRING, .fallback = "emberctl", .help = "who leases it, for ps"},
    {"timeout", VALUE_DURATION, .fallback = "10m", .help = "how long to wait, a load included"},
    {0}};
static const struct verb_option stop_options[] = {
    {"keep-warm", VALUE_BOOL, .help = "end the lease and give the instance back to the pool"}, {0}};
static const struct verb_option generate_options[] = {
    {"model", VALUE_STRING, .letter = 'm', .help = "which model (default: the daemon's)"},
    {"max-tokens", VALUE_INT, .fallback = "256", .limits = "1..1000000", .letter = 'n',
     .help = "tokens at most"},
    {"temperature", VALUE_REAL, .fallback = "0", .limits = "0..", .letter = 't',
     .help = "0: the most probable token each time"},
    {"top-k", VALUE_INT, .fallback = "0", .limits = "0..10000000",
     .help = "sample among the K best; 0: all"},
    {"top-p", VALUE_REAL, .fallback = "1", .limits = "0..1",
     .help = "sample among the best that make up this probability"},
    {"min-p", VALUE_REAL, .fallback = "0", .limits = "0..1",
     .help = "leave out what is less probable than this share of the best"},
    {"seed", VALUE_INT, .fallback = "0", .limits = "0..", .help = "same seed, same tokens"},
    {"chat", VALUE_BOOL,
     .help = "the prompt is a user's message: put it into the model's chat template"},
    {"ignore-eos", VALUE_BOOL, .help = "go on behind the end-of-text token"},
    {"stats", VALUE_BOOL, .help = "print times on standard error also when that is no terminal"},
    {0}};
static const struct verb_option verify_options[] = {
    {"backend", VALUE_STRING, .fallback = "cpu", .help = "cpu, or the path of a plug-in"},
    {"isa", VALUE_ENUM, .limits = CLI_ISAS, .help = "force this variant of the CPU kernels"},
    {"threads", VALUE_INT, .fallback = "0", .limits = "0..1024",
     .help = "0: what the machine allows"},
    {"compile", VALUE_BOOL, .help = "compile specialised kernels first"},
    {"kv-type", VALUE_ENUM, .fallback = "auto", .limits = KV_CHOICES,
     .help = "what K and V are kept in; auto is f32, or bf16 under --quant"},
    {"tolerance", VALUE_REAL, .fallback = "1e-3", .limits = "0..",
     .help = "of logits and hidden states, relative to the largest"},
    {0}};
static const struct verb_option verify_tokenizer_options[] = {
    {"tokenizer", VALUE_PATH, .fallback = ".",
     .help = "tokenizer.json (.xz too), or a folder that has one"},
    {0}};
static const struct verb_option verify_template_options[] = {
    {"template", VALUE_PATH, .help = "the template's file (chat_template.jinja)"}, {0}};
static const struct verb_option cache_options[] = {
    {"cache-dir", VALUE_PATH, .help = "the cache's folder (default: emberd's)"}, {0}};
static const struct verb_option gc_options[] = {
    {"cache-dir", VALUE_PATH, .help = "the cache's folder (default: emberd's)"},
    {"max-bytes", VALUE_BYTES, .help = "keep at most this much"},
    {"max-age", VALUE_DURATION, .help = "remove what was not used for so long"},
    {0}};
static const struct verb_option export_options[] = {
    {"cache-dir", VALUE_PATH, .help = "the cache's folder (default: emberd's)"},
    {"kind", VALUE_ENUM, .limits = "kernel|graph|canary|tokenizer|record", .help = "only these"},
    {0}};
static const struct verb_option bench_spawn_options[] = {
    {"spawns", VALUE_INT, .fallback = "200", .limits = "5..100000",
     .help = "spawns from the warm pool"},
    {"burst", VALUE_INT, .fallback = "64", .limits = "1..256", .help = "spawns at once"},
    {"dir", VALUE_PATH, .help = "where checkpoints of shapes are written and kept"},
    {0}};
static const struct verb_option bench_load_options[] = {
    {"text", VALUE_PATH, .help = "encode this file instead of Debian's licences"}, {0}};
static const struct verb_option bench_kernels_options[] = {
    {"model", VALUE_ENUM, .limits = "tiny|0.6B|1.7B|4B|30B-A3B",
     .help = "only this model's shapes"},
    {"kernel", VALUE_STRING, .help = "only kernels whose name begins so"},
    {"threads", VALUE_INT, .fallback = "0", .limits = "0..1024",
     .help = "0: what the machine allows"},
    {"isa", VALUE_ENUM, .limits = CLI_ISAS, .help = "force this variant of the CPU kernels"},
    {0}};
#define BENCH_STEP_OPTIONS                                                                         \
    {"layers", VALUE_INT, .fallback = "0", .limits = "0..1000",                                    \
     .help = "only so many layers of a shape; 0: all"},                                            \
        {"threads", VALUE_INT, .fallback = "0", .limits = "0..1024",                               \
         .help = "0: what the machine allows"},                                                    \
        {"pin", VALUE_ENUM, .fallback = "auto", .limits = "never|auto|always",                     \
         .help = "whether threads stay on nodes and CPUs, as for the first instance of emberd"},   \
        {"isa", VALUE_ENUM, .limits = CLI_ISAS, .help = "force this variant of the CPU kernels"},  \
        {"kv-type", VALUE_ENUM, .fallback = "auto", .limits = KV_CHOICES,                          \
         .help = "what K and V are kept in; auto is f32, or bf16 under --quant"},                  \
        CLI_QUANT_OPTIONS,                                                                         \
        {"seconds", VALUE_REAL, .fallback = "3", .limits = "0..600",                               \
         .help = "to spend on each figure"},                                                       \
    {                                                                                              \
        "dir", VALUE_PATH, .help = "where checkpoints of shapes are written and kept"              \
    }
static const struct verb_option bench_decode_options[] = {
    {"streams", VALUE_INT, .fallback = "16", .limits = "1..64", .help = "sequences at once"},
    {"context", VALUE_INT, .fallback = "8192", .limits = "0..1000000",
     .help = "tokens before the long row's; 0: no such row"},
    BENCH_STEP_OPTIONS,
    {0}};
static const struct verb_option bench_prefill_options[] = {
    {"tokens", VALUE_INT, .fallback = "512", .limits = "1..512", .help = "of the prompt"},
    BENCH_STEP_OPTIONS,
    {0}};
static const struct verb_option pack_options[] = {
    {"output", VALUE_PATH, .letter = 'o', .help = "the pack's file (default: DIR.pack)"},
    {"rate", VALUE_BYTES, .fallback = "0", .help = "bytes a second to write at most; 0: no limit"},
    CLI_QUANT_OPTIONS,
    {"perplexity", VALUE_BOOL, .fallback = "yes",
     .help = "run a text before and after, to see what --quant costs"},
    CLI_PERPLEXITY_OPTIONS,
    {0}};
static const struct verb_option bench_serve_options[] = {
    {"output", VALUE_INT, .fallback = "48", .limits = "8..1000", .help = "tokens of a stream"},
    {"prompt", VALUE_INT, .fallback = "256", .limits = "8..1000",
     .help = "tokens of the prompts whose first token is waited for"},
    {"kv-mib", VALUE_INT, .fallback = "1024", .limits = "16..1000000",
     .help = "KV memory of the instance, MiB"},
    {"figure", VALUE_ENUM, .limits = "throughput|ttft|prefix|parked|fairness|failover|metrics",
     .help = "only this one"},
    {"settle", VALUE_INT, .fallback = "4", .limits = "0..600",
     .help = "seconds of requests before anything is measured"},
    {"dir", VALUE_PATH, .help = "where checkpoints of shapes are written and kept"},
    {0}};
static const struct verb_option perplexity_options[] = {
    CLI_QUANT_OPTIONS,
    {"kv-type", VALUE_ENUM, .fallback = "auto", .limits = KV_CHOICES,
     .help = "what K and V are kept in when the text is run again"},
    CLI_PERPLEXITY_OPTIONS,
    {0}};
static const struct verb_option synth_options[] = {
    {"layers", VALUE_INT, .fallback = "0", .limits = "0..100000",
     .help = "only so many layers; 0: all"},
    {"seed", VALUE_INT, .fallback = "1", .help = "same seed, same bytes"},
    {0}};

static const struct verb verbs[] = {
    {"load", "DIR|PACK", "make a checkpoint resident",
     "DIR is a folder in Hugging Face form: config.json, model.safetensors (or its index and "
     "shards) and the tokenizer's files. PACK is a file that emberctl pack has written; the "
     "tokenizer is looked for in the folder that it was made from, else beside it.",
     load_options,
     "load ./Qwen3-0.6B\tunder the name Qwen3-0.6B\n"
     "load ./Qwen3-0.6B --quant q8\t8 bits a weight, about half the memory of bf16\n"
     "load ./Qwen3-0.6B --standby=4 --kv-bytes=1GiB\tfour warm instances of 1 GiB of KV each\n",
     run_load},
    {"unload", "MODEL", "give a model's memory back",
     "Its standbys end, and the model is cold: it is loaded again when somebody wants it. A model "
     "that is cold or failed, and that no configuration names, is forgotten: emberctl models and "
     "the gateway list it no longer. A model with leased instances is refused unless --force is "
     "given.",
     unload_options, "unload Qwen3-0.6B\t\n", run_unload},
    {"models", "", "list models",
     "STATE: cold (on disk), loading, parked (weights in memory), warm (standbys too), hot "
     "(leased), failed (ERROR says why; the next use tries again).",
     NULL, "models --json\twith paths, digests and exact sizes\n", run_models},
    {"spawn", "[MODEL]", "lease an instance and print where it is",
     "The lease ends when its time is over, unless a program connects to the instance's socket "
     "with the lease's token and drives it (ember/v1/step.proto).",
     spawn_options, "spawn ember-tiny --json\tfor a program that will drive it\n", run_spawn},
    {"stop", "INSTANCE...", "stop instances, or end their leases", NULL, stop_options,
     "stop i7e8a-1\t\n"
     "stop --keep-warm i7e8a-1\tit becomes a standby again\n",
     run_stop},
    {"ps", "[MODEL]", "list instances",
     "OWN MEMORY: KV, graphs and scratch; weights are shared and not counted here. HOLDER: who "
     "leases it. DRIVEN: whether the holder is connected to it now.",
     NULL, "ps ember-tiny\t\n", run_ps},
    {"status", "", "what emberd holds and has done", NULL, NULL, "status --json\t\n", run_status},
    {"generate", "[PROMPT...]", "generate text on an instance of one's own",
     "Leases an instance, runs the prompt on it and streams the text; gives it back at the end. "
     "The prompt is read from standard input when there is none on the command line. If the "
     "instance dies, another takes over where it was.",
     generate_options,
     "generate --chat \"What is a river?\"\ta question to the embedded model\n"
     "generate -m Qwen3-0.6B -n 50 < story.txt\tcontinue a text\n",
     run_generate},
    {"verify", "DIR...", "compare a checkpoint with another implementation's numbers",
     "A DIR holds a checkpoint and either case.json with expected.safetensors (logits, hidden "
     "states, greedy tokens) or expected_text.json (prompts and texts). Prints the worst error of "
     "the logits relative to the largest, the cosine, greedy tokens, and for each layer its error: "
     "the first layer that goes wrong is named, which is how a new architecture is brought up. No "
     "daemon is needed.",
     verify_options,
     "verify tests/goldens/*\tall of them; exit 1 if one fails, else 4 if one is not there\n",
     run_verify},
    {"verify tokenizer", "FILE...", "compare a tokenizer with reference ids and texts",
     "Each FILE is an expected.json: texts with the ids and the decoded forms that the reference "
     "gives. Prints the first differing id or character of each mismatch with what surrounds it.",
     verify_tokenizer_options, "verify tokenizer --tokenizer tokenizer.json expected.json\t\n",
     run_verify_tokenizer},
    {"verify template", "FILE...", "compare a chat template with a reference's renderings",
     "Each FILE is an expected.json: conversations with the text that the reference renders, or "
     "its refusal. Prints the first differing character of each mismatch with what surrounds it.",
     verify_template_options, "verify template --template chat_template.jinja expected.json\t\n",
     run_verify_template},
    {"pack", "DIR", "write a checkpoint as a pack",
     "A pack holds the weights as they are in memory, so that a load is a plain read: the same "
     "numbers, nothing rounded. Interrupted or killed, it goes on where it was when it is asked "
     "again. Load it by its file's name. With --quant matrices are quantised first, and the error "
     "of each layer and tensor is printed (the root of the mean square of differences over that of "
     "values). No daemon is needed.",
     pack_options,
     "pack ./Qwen3-0.6B --quant q4 --text wiki.txt\t4 bits a weight, and what it costs\n"
     "pack ./Qwen3-0.6B -o /packs/qwen3.pack\t\n",
     run_pack},
    {"pack verify", "FILE...", "read packs and compare every checksum",
     "Damaged segments are named with their tensors; exit 1 when there are any, else 4 when a file "
     "is not there.",
     NULL, "pack verify /packs/*.pack\t\n", run_pack_verify},
    {"perplexity", "DIR",
     "how well a checkpoint predicts a text, and what quantising costs of that",
     "The exponential of the mean of -ln p over the text's tokens, each predicted from those "
     "before it in its window. With --quant or --kv-type the checkpoint is run as it is and then "
     "so. No daemon is needed.",
     perplexity_options,
     "perplexity ./Qwen3-0.6B --quant q4\tbefore and after\n"
     "perplexity ./Qwen3-0.6B --kv-type int8\twhat K and V in 8 bits cost\n"
     "perplexity ./Qwen3-0.6B --quant q4 --keep 'layers\\.0\\.' --text wiki.txt\t\n",
     run_perplexity},
    {"cache ls", "", "list cached kernels, graphs and records", NULL, cache_options,
     "cache ls --cache-dir=/var/cache/emberd\tanother user's, or a copy\n", run_cache_ls},
    {"cache show", "KEY", "one entry and what it depends on",
     "KEY is a key of cache ls or its beginning.", cache_options, "cache show 0646f0\t\n",
     run_cache_show},
    {"cache verify", "", "read and check every value",
     "Damaged values are put into quarantine and built again at their next use; the exit status is "
     "then 1.",
     cache_options, "cache verify\t\n", run_cache_verify},
    {"cache gc", "", "remove what was not used for long", NULL, gc_options,
     "cache gc --max-age 720h --max-bytes 256MiB\t\n", run_cache_gc},
    {"cache export", "FILE", "write the cache as one bundle", "FILE may be - for standard output.",
     export_options, "cache export kernels.ember --kind kernel\t\n", run_cache_export},
    {"cache import", "FILE", "take a bundle in",
     "Every value is checked before it is stored. A bundle holds code: import only what you trust.",
     cache_options, "cache import kernels.ember\t\n", run_cache_import},
    {"bench spawn", "[SHAPE|DIR...]", "measure starts, on a private emberd",
     "DIR is a checkpoint; a SHAPE is tiny (the embedded model), qwen3-0.6b, qwen3-1.7b, qwen3-4b, "
     "qwen3-8b; of a shape a checkpoint with random weights is written first.",
     bench_spawn_options, "bench spawn tiny qwen3-0.6b\t\n", run_bench_spawn},
    {"bench load", "[DIR|PACK|FILE...]",
     "measure loading a model's parts, against doing it without caches",
     "DIR is a checkpoint, PACK a pack of one, FILE a tokenizer.json; without one it is the "
     "embedded model. Prints what a load takes, out of the page cache and from the disk, beside "
     "what memory and disk give in the same run, and the time from emberd's exec to a first token; "
     "paths behind the first are compared with it. Then what parsing tokenizer.json takes and what "
     "mapping its compiled image from the cache takes, and how fast one core encodes.",
     bench_load_options,
     "bench load models/ember-tiny\t\n"
     "bench load ./Qwen3-0.6B q8.pack q4.pack\tpacks against the checkpoint\n",
     run_bench_load},
    {"bench serve", "[SHAPE|DIR...]", "measure serving, on a private emberd and gateway",
     "Scheduler and gateway costs, streams together against one alone, times to the first token "
     "alone, under load, with a shared prefix and from a parked model, fairness, an instance "
     "killed under 32 streams, scrapes of /metrics; each beside its target. SHAPE (see bench "
     "spawn; default qwen3-0.6b) gets a made-up tokenizer.",
     bench_serve_options, "bench serve tiny\t\n", run_bench_serve},
    {"bench kernels", "", "measure CPU kernels, specialised against not",
     "Prints each kernel's time and its fraction of the limit measured in the same run.",
     bench_kernels_options, "bench kernels --model 0.6B --kernel attention\t\n", run_bench_kernels},
    {"bench decode", "[SHAPE|DIR...]", "measure decoding through the engine in this process",
     "Prints tokens/s of one stream and of several, the share of the read bandwidth measured in "
     "the same run over the bytes that must be read, attention behind a long context, what "
     "replaying the graph costs beside its kernels, and where the time goes. SHAPE (see bench "
     "spawn; default qwen3-0.6b) may also be qwen3-30b-a3b, which needs --layers on most machines.",
     bench_decode_options,
     "bench decode qwen3-4b --context 0\t\n"
     "bench decode --quant q8\tquantised while it is loaded\n",
     run_bench_decode},
    {"bench prefill", "[SHAPE|DIR...]", "measure a prompt through the engine in this process",
     "As bench decode; the share is of the multiply-adds that the processor does in registers: "
     "with --quant of int8, without of bf16.",
     bench_prefill_options, "bench prefill --tokens 256\t\n", run_bench_prefill},
    {"bench grammar", "[DIR|FILE]",
     "measure structured output: compiling grammars, masks of tokens",
     "DIR is a checkpoint, FILE a tokenizer.json; without one it is the embedded model's. Prints "
     "what compiling takes, and a mask of the tokens that may follow: where nobody has been before "
     "(on average, and the worst one), and where somebody has.",
     NULL, "bench grammar ./Qwen3-0.6B\t\n", run_bench_grammar},
    {"synth", "CONFIG DIR", "write a checkpoint with random weights",
     "CONFIG is a real config.json or the name of a shape (see bench spawn). No tokenizer is "
     "written: such a model can be loaded, spawned and measured; generate needs one.",
     synth_options, "synth qwen3-0.6b /tmp/q\t\n", run_synth},
    {"demo", "", "the degrees of warmth side by side, on a private emberd", NULL, NULL,
     "demo --json\t\n", run_demo},
    {0}};

static const struct verb_exit exits[] = {{CLI_OK, "done"},
                                         {CLI_FAILED, "it failed, or did not pass"},
                                         {CLI_USAGE, "the command line is wrong"},
                                         {CLI_NO_DAEMON, "emberd cannot be reached"},
                                         {CLI_NOT_FOUND, "no such model, instance, file or folder"},
                                         {CLI_NO_ROOM, "not enough memory or disk"},
                                         {CLI_INTERRUPTED, "interrupted"},
                                         {0}};

static const struct verb_program program = {
    .name = "emberctl",
    .version = EMBER_VERSION,
    .summary = "load models into emberd, spawn instances, generate, verify, measure",
    .about = "emberd keeps models resident and hands out warm instances of them. The verbs load, "
             "unload, models, spawn, stop, ps, status and generate talk to it; the others need no "
             "daemon.",
    .globals = globals,
    .verbs = verbs,
    .exits = exits,
    .see_also = "emberd(8)",
    .named = "MODEL models\nINSTANCE ps\n",
};

int main(int argc, char **argv)
{
    _cleanup_(verb_call_freep) struct verb_call *call = NULL;
    _cleanup_(buffer_free) struct buffer text = {0};
    struct error err = {0};

    signal(SIGPIPE, SIG_IGN);
    int r = verb_parse(&program, argc, argv, &call, &text, &err);
    if (r == VERB_TEXT) {
        fputs(text.data, stdout);
        return CLI_OK;
    }
    if (r < 0)
        return cli_fail_usage(argc, argv, &err);
    int status = call->verb->run(call);
    if ((fflush(stdout) || ferror(stdout)) && status == CLI_OK) {
        fprintf(stderr, "emberctl: standard output: not everything could be written\n");
        status = CLI_FAILED;
    }
    return status;
}
