# SPDX-License-Identifier: Apache-2.0
"""Attacks by what comes from outside: damaged checkpoints, hostile peers, absurd options."""
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import unittest

import harness
from attack import (CASES, CODE, GOLDEN, Q, SANITIZED, UP, Attack, Driver, write_text)
from harness import TINY, grpc, pb, step


def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    n, = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + n]), data[8 + n:]


def write_safetensors(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text) if length is None else length) + text + data)


def with_file(change):
    """change(header, data) → the arguments of write_safetensors behind the path."""
    def apply(path):
        file = f"{path}/model.safetensors"
        write_safetensors(file, *change(*read_safetensors(file)))
    return apply


def with_header(change):
    def apply(header, data):
        change(header)
        return header, data
    return with_file(apply)


def with_tensor(name=Q, **values):
    return with_header(lambda header: header[name].update(values))


def overlap(header):
    first, second = sorted((h["data_offsets"][0], n) for n, h in header.items()
                           if n != "__metadata__")[:2]
    offsets = header[second[1]]["data_offsets"]
    size = offsets[1] - offsets[0]
    header[second[1]]["data_offsets"] = [first[0] + 2, first[0] + 2 + size]


def with_index(change=lambda names: None, lose=()):
    """Two shards and an index; change(names) edits its weight map, files in `lose` are removed."""
    def apply(path):
        header, data = read_safetensors(f"{path}/model.safetensors")
        header.pop("__metadata__", None)
        names = {}
        for k, shard in enumerate(("a.safetensors", "b.safetensors")):
            part, out = {}, b""
            for name in sorted(header)[k::2]:
                begin, end = header[name]["data_offsets"]
                part[name] = dict(header[name], data_offsets=[len(out), len(out) + end - begin])
                out += data[begin:end]
                names[name] = shard
            write_safetensors(f"{path}/{shard}", part, out)
        os.unlink(f"{path}/model.safetensors")
        change(names)
        with open(f"{path}/model.safetensors.index.json", "w") as f:
            json.dump({"weight_map": names}, f)
        for name in lose:
            os.unlink(f"{path}/{name}")
    return apply


def other_shard(names):
    names[Q] = "b.safetensors" if names[Q][0] == "a" else "a.safetensors"


def replaced(name, make):
    def apply(path):
        os.unlink(f"{path}/{name}")
        make(f"{path}/{name}")
    return apply


def configured(text=None, **values):
    """config.json with other values; `text`: a JSON literal for the last of them."""
    def apply(path):
        with open(f"{path}/config.json") as f:
            config = json.load(f)
        config.update(values)
        out = json.dumps(config)
        with open(f"{path}/config.json", "w") as f:
            f.write(out.replace('"@"', text) if text else out)
    return apply


LOSS, NONE, BAD, NEW = (CODE.DATA_LOSS, CODE.NOT_FOUND, CODE.INVALID_ARGUMENT, CODE.UNIMPLEMENTED)
DAMAGED = [
    # what is wrong, how it is made, status, text
    ("shard shorter than its header", with_file(lambda h, d: (h, d[:-1])), LOSS, "truncated"),
    ("shard longer than its header", with_file(lambda h, d: (h, d + b"x")), LOSS, "1 bytes behind"),
    ("no bytes", with_file(lambda h, d: (b"", b"", 0)), LOSS, "header"),
    ("three bytes", replaced("model.safetensors", write_text("abc")), LOSS, "too short"),
    ("header length beyond the file", with_file(lambda h, d: (h, d, 10 ** 7)), LOSS, "10000000"),
    ("header length 2^63", with_file(lambda h, d: (h, d, 2 ** 63)), LOSS, "says that its header"),
    ("header length 2^64-1", with_file(lambda h, d: (h, d, 2 ** 64 - 1)), LOSS, "says that its"),
    ("header nested a million deep", with_file(lambda h, d: (b"[" * 10 ** 6, d)), LOSS, "depth"),
    ("header of bytes", with_file(lambda h, d: (b"\xff\xfe" * 50, d)), LOSS, "header"),
    ("header an array", with_file(lambda h, d: (b"[]", d)), LOSS, "not a JSON object"),
    ("offsets beyond the file", with_tensor(data_offsets=[2 ** 62, 2 ** 62 + 8192]), LOSS, Q),
    ("offsets overflowing", with_tensor(data_offsets=[2 ** 63 - 8, 2 ** 63 - 1]), LOSS, Q),
    ("offsets beyond 64 bits", with_tensor(data_offsets=[0, 2 ** 64]), LOSS, "big integer"),
    ("offsets negative", with_tensor(data_offsets=[-8, 8]), LOSS, Q),
    ("offsets reversed", with_tensor(data_offsets=[8192, 0]), LOSS, Q),
    ("offsets fractions", with_tensor(data_offsets=[0.5, 1e30]), LOSS, Q),
    ("tensors overlap", with_header(overlap), LOSS, "overlaps|belong to none"),
    ("shape overflows", with_tensor(shape=[2 ** 32, 2 ** 32]), LOSS, "absurd|do not take"),
    ("shape of 300 dimensions", with_tensor(shape=[1] * 300), LOSS, "shape"),
    ("shape is not config.json's", with_header(lambda h: h[UP]["shape"].reverse()), BAD, UP),
    ("dtype of another size", with_tensor(dtype="F64"), LOSS, "F64"),
    ("dtype of integers", with_tensor(dtype="I16"), NEW, "I16"),
    ("dtype unheard of", with_tensor(dtype="Q" * 5000), NEW, Q),
    ("dtype a number", with_tensor(dtype=7), LOSS, "dtype"),
    ("tensor missing", with_header(lambda h: h.update(other=h.pop(Q))), NONE, Q),
    ("tensor null", with_header(lambda h: h.update({Q: None})), LOSS, Q),
    ("weights a folder", replaced("model.safetensors", os.mkdir), LOSS, "not a regular file"),
    ("weights a FIFO", replaced("model.safetensors", os.mkfifo), LOSS, "not a regular file"),
    ("weights a device", replaced("model.safetensors", lambda p: os.symlink("/dev/zero", p)), LOSS,
     "not a regular file"),
    ("weights a dangling link", replaced("model.safetensors", lambda p: os.symlink("/none", p)),
     NONE, "holds neither"),
    ("index names a missing shard", with_index(lose=["b.safetensors"]), NONE, "b.safetensors"),
    ("index names a missing tensor", with_index(lambda n: n.update(nope="a.safetensors")), LOSS,
     "nope"),
    ("index names another shard", with_index(other_shard), LOSS, Q),
    ("index names no shard", with_index(lambda n: n.update({Q: 7})), LOSS, Q),
    ("index leaves the folder", with_index(lambda n: n.update({Q: "../x"})), LOSS, "not the name"),
    ("index names 5000 shards", with_index(lambda n: n.update((f"t{i}", f"s{i}") for i in
                                                              range(5000))), NONE, "missing"),
    ("index names a long shard", with_index(lambda n: n.update(nope="x" * 5000)), LOSS, "not the name"),
    ("index is empty", with_index(lambda n: n.clear()), NONE, "missing"),
    ("config.json a FIFO", replaced("config.json", os.mkfifo), BAD, "not a regular file"),
    ("config.json a folder", replaced("config.json", os.mkdir), BAD, "not a regular file"),
    ("config.json missing", replaced("config.json", lambda p: None), NONE, "config.json"),
    ("config.json empty", replaced("config.json", write_text("")), BAD, "line 1"),
    ("config.json huge", replaced("config.json", write_text(" " * (17 << 20))), BAD, "limit"),
    ("config.json deep", replaced("config.json", write_text("[" * 10 ** 6)), BAD, "depth"),
    ("config.json an array", replaced("config.json", write_text("[]")), BAD, "not a JSON object"),
    ("config.json without a type", replaced("config.json", write_text("{}")), BAD, "model_type"),
    ("config NaN", configured("NaN", rms_norm_eps="@"), BAD, "NaN"),
    ("config Infinity", configured("-Infinity", rope_theta="@"), BAD, "Infinity"),
    ("config beyond a double", configured("1e999", rope_theta="@"), BAD, "overflow"),
    ("config layers absurd", configured(num_hidden_layers=10 ** 9), BAD, "num_hidden_layers"),
    ("config layers negative", configured(num_hidden_layers=-1), BAD, "num_hidden_layers"),
    ("config layers a text", configured(num_hidden_layers="2"), BAD, "num_hidden_layers"),
    ("config heads 0", configured(num_attention_heads=0), BAD, "num_attention_heads"),
    ("config hidden size 2^63", configured(hidden_size=2 ** 63 - 1), BAD, "hidden_size"),
    ("config scaling not an object", configured(rope_parameters=[8]), BAD, "not an object"),
    ("config scaling unheard of", configured(rope_parameters={"rope_type": "x", "factor": 2}), NEW,
     "\"?x\"?"),
    ("config type with an escape code", configured(model_type="\x1b[31m\u202e" + "é" * 900), NEW,
     "\\?\\[31m"),
]


class Checkpoints(Attack):
    def test_damaged_files(self):
        d = self.daemon("--standby=0", "--load-timeout-no-progress=5m", "--log-level=error")
        folder, fds = self.folder(), len(d.fds())
        d.load(GOLDEN)
        self.nothing_left(d)
        fds = len(d.fds())
        for i, (what, damage, code, text) in enumerate(DAMAGED):
            path = f"{folder}/m{i}"
            shutil.copytree(GOLDEN, path)
            damage(path)
            with self.subTest(what):
                self.fails(code, lambda: d.client.LoadModel(path=path), text)
                self.assertIn(f"m{i}", [m.name for m in d.client.ListModels().models])
            shutil.rmtree(path)
        self.assertEqual(d.client.GetStatus().load_failures, len(DAMAGED))
        self.nothing_left(d, fds)
        self.serves(d)

    def test_a_sharded_checkpoint_is_the_same_model(self):
        """What the damaged shards are made from is sound."""
        d, path = self.daemon("--standby=0"), self.folder() + "/sharded"
        shutil.copytree(TINY, path)
        with_index()(path)
        whole = d.load(TINY)[-1].model
        self.assertEqual(d.load(path)[-1].model.weights_bytes, whole.weights_bytes)
        self.serves(d, model="sharded")

    def test_weights_of_nan_end_no_instance(self):
        d, path = self.daemon("--standby=0"), self.folder() + "/nan"
        shutil.copytree(GOLDEN, path)
        with_file(lambda h, data: (h, b"\xff" * len(data)))(path)
        d.load(path)
        spawned = d.client.SpawnInstance(model="nan")
        driver = Driver(spawned)
        for temperature in (0, 1):
            sampling = step.Sampling(temperature=temperature, logprobs=8)
            driver.send(step.DriverFrame(step=step.Step(id=1, sequences=[step.SequenceStep(
                id=1, tokens=[1, 2], pages=[0], prompt_len=2, sample=True, sampling=sampling)])))
            self.assertLess(driver.receive().result.sequences[0].token, driver.welcome.vocab_size)

    def test_model_too_large_is_refused_with_the_numbers(self):
        d = self.daemon("--memory-limit=8MiB", "--standby=0")
        self.fails(CODE.OUT_OF_RANGE, lambda: d.client.LoadModel(path=TINY),
                   r"needs \d+\.\d MiB; the budget is 8.0 MiB")
        d.load(GOLDEN)
        self.fails(CODE.OUT_OF_RANGE, lambda: d.client.SpawnInstance(model="llama"),
                   r"needs \d+\.\d MiB; the budget is 8.0 MiB")
        self.nothing_left(d)

    def test_kv_memory_absurd(self):
        d = self.daemon("--standby=0")
        for known in (False, True):  # before its weights are known, and behind
            self.fails(CODE.OUT_OF_RANGE, lambda: d.load(kv_bytes=2 ** 64 - 1), "the budget is")
            if not known:
                self.assertTrue(d.load())
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(kv_bytes=1), "kv_bytes is 1; one page")
        d.load(kv_bytes=8 << 20)
        self.serves(d)

    def test_kv_type_unknown(self):
        d = self.daemon("--standby=0", "--kv-type=bf16")
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(kv_type="int4"), "bf16")
        # What is asked for in one request counts together: a page of int8 is smaller than one of bf16.
        d.load()
        page = 8 * 16 * 2 * (2 * 64 + 2 * 64)
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(kv_bytes=page // 2 + (8 << 10)), f"takes {page}")
        self.assertEqual(d.model("ember-tiny").kv_type, "bf16")
        # And with what was asked for before: it has to hold a page of the new kind.
        d.load(kv_bytes=page // 2 + (8 << 10), kv_type="int8")
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(kv_type="f32"), f"takes {2 * page}")
        self.assertEqual(d.model("ember-tiny").kv_type, "int8")
        self.assertTrue(d.client.SpawnInstance(model="ember-tiny").instance.id)
        d.load(kv_bytes=page * 32, kv_type="int8")
        self.assertEqual(d.model("ember-tiny").kv_type, "int8")
        self.serves(d)

    def test_folder_changed_and_deleted_while_resident(self):
        d, path = self.daemon("--standby=0"), self.folder() + "/mine"
        shutil.copytree(TINY, path)
        d.load(path)
        shutil.copy(f"{GOLDEN}/config.json", f"{path}/config.json")
        self.serves(d, model="mine")
        shutil.rmtree(path)
        self.serves(d, model="mine")
        d.client.UnloadModel(name="mine", force=True)
        self.fails(CODE.NOT_FOUND, lambda: d.client.SpawnInstance(model="mine"), "config.json")
        shutil.copytree(TINY, path)
        self.serves(d, model="mine")


# ---- the step socket ----

def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def rss(pid, key="VmRSS"):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key + ":")) << 10


class Steps(Attack):
    def setUp(self):
        super().setUp()
        self.d = self.daemon("--standby=1", "--log-level=error", "--shutdown-timeout=0")
        self.spawned = self.d.client.SpawnInstance()
        self.driver = Driver(self.spawned)

    def step(self, *sequences):
        self.driver.send(step.DriverFrame(step=step.Step(id=9, sequences=sequences)))
        result = self.driver.receive().result
        self.assertEqual(result.id, 9)
        return result

    def sequence(self, n=1, position=0, pages=None, token=1, sampling=None, **fields):
        size = self.driver.welcome.page_size
        if pages is None:
            pages = range((position + n + size - 1) // size)
        return step.SequenceStep(id=1, tokens=[token] * n, position=position, pages=pages,
                                 prompt_len=n, sample=True,
                                 sampling=sampling and step.Sampling(**sampling), **fields)

    def test_absurd_steps(self):
        w, top, nan, s = self.driver.welcome, 2 ** 32 - 1, float("nan"), self.sequence
        pages = [0] * (w.max_positions // w.page_size + 1)
        absurd = {
            "no sequences": [],
            "no tokens": [s(n=0)],
            "token beyond the vocabulary": [s(token=w.vocab_size)],
            "token 2^32-1": [s(token=top)],
            "page beyond the range": [s(pages=[w.pages])],
            "page 2^32-1": [s(pages=[top])],
            "no pages": [s(pages=[])],
            "position 2^32-1": [s(position=top, pages=pages)],
            "position behind the last": [s(position=w.max_positions, pages=pages)],
            "a million tokens": [s(n=10 ** 6, pages=pages)],
            "too many tokens": [s(n=1500)],
            "too many sequences": [s()] * (w.max_seqs + 1),
            "5000 sequences": [s()] * 5000,
            "temperature NaN": [s(sampling={"temperature": nan})],
            "temperature infinite": [s(sampling={"temperature": float("inf")})],
            "temperature negative": [s(sampling={"temperature": -1})],
            "top_p NaN": [s(sampling={"temperature": 1, "top_p": nan})],
            "min_p 2": [s(sampling={"temperature": 1, "min_p": 2})],
            "logprobs 2^32-1": [s(sampling={"logprobs": top})],
            "the second of two": [s(), s(token=top)],
        }
        for what, sequences in absurd.items():
            with self.subTest(what):
                result = self.step(*sequences)
                self.assertIn(result.error, (7, 22), result)  # E2BIG, EINVAL
                self.assertTrue(result.error_text)
                self.assertFalse(result.sequences)
        odd = {
            "last position": [s(position=w.max_positions - 1, pages=pages)],
            "two million pages": [s(pages=[0] * 2000000)],
            "prompt_len 2^32-1": [step.SequenceStep(tokens=[1], pages=[0], prompt_len=top,
                                                    sample=True)],
            "two sequences on one page": [s(n=3, pages=[0]), s(n=3, pages=[0])],
            "temperature denormal": [s(sampling={"temperature": 1e-45})],
            "temperature huge": [s(sampling={"temperature": 3e38})],
            "top_k 2^32-1": [s(sampling={"temperature": 1, "top_k": top})],
            "top_p infinite": [s(sampling={"temperature": 1, "top_p": float("inf")})],
            "seed and index at their ends": [s(sampling={"temperature": 1, "seed": 2 ** 64 - 1},
                                               sample_index=top)],
            "all sequences with all logprobs": [s(sampling={"logprobs": 64})] * w.max_seqs,
        }
        for what, sequences in odd.items():
            with self.subTest(what):
                result = self.step(*sequences)
                self.assertEqual((result.error, len(result.sequences)), (0, len(sequences)))
                self.assertLess(max(r.token for r in result.sequences), w.vocab_size)
        self.assertEqual(self.driver.case(CASES[0]), CASES[0]["greedy_ids"])

    def exchange(self, data):
        """What the instance answers to these bytes before it closes the connection."""
        out = b""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            s.connect(self.spawned.instance.socket)
            try:
                s.sendall(data)
                while chunk := s.recv(65536):
                    out += chunk
            except (BrokenPipeError, ConnectionResetError):
                pass
        return out

    def frame(self, data):
        return struct.pack("<I", len(data)) + data

    def hello(self, token, protocol=1):
        hello = step.Hello(protocol=protocol, lease_token=token)
        return self.frame(step.DriverFrame(hello=hello).SerializeToString())

    def test_strangers_end_only_their_own_connection(self):
        token = self.spawned.lease.token
        one = step.DriverFrame(step=step.Step(sequences=[self.sequence()])).SerializeToString()
        for what, data, text in (
                ("a frame of 0 bytes", self.frame(b""), b"16 MiB"),
                ("a frame of 4 GiB", b"\xff" * 4, b"16 MiB"),
                ("garbage", os.urandom(64), b""),
                ("garbage in a frame", self.frame(b"\xff" * 64), b"not a DriverFrame"),
                ("an unknown field", self.frame(b"\x78\x01"), b"Hello first"),
                ("a step before Hello", self.frame(one), b"Hello first"),
                ("a large frame before Hello", self.frame(b"\x12" + b"\0" * 100000), b"large"),
                ("half of a large frame before Hello", struct.pack("<I", 1 << 20) + b"x" * 5000,
                 b"large"),
                ("another protocol", self.hello(token, 2), b"protocol 1"),
                ("no token", self.hello(""), b"not that of"),
                ("half the token", self.hello(token[:16]), b"not that of"),
                ("a longer token", self.hello(token + "0"), b"not that of")):
            with self.subTest(what):
                self.assertIn(text, self.exchange(data))
        for i in range(500):
            self.assertIn(b"not that of", self.exchange(self.hello(f"{i:032x}")))
        crowd = []
        for _ in range(60):
            s = socket.socket(socket.AF_UNIX)
            s.setblocking(False)
            crowd.append(s)
            s.connect_ex(self.spawned.instance.socket)
        self.assertEqual(self.driver.case(CASES[1]), CASES[1]["greedy_ids"])
        for s in crowd:
            s.close()

    def test_half_a_frame_is_not_waited_for(self):
        self.assertEqual(self.exchange(struct.pack("<I", 100) + b"abc"), b"")

    def test_frames_that_would_unpack_to_a_gigabyte(self):
        pid, n = self.spawned.instance.pid, (16 << 20) // 2 - 16
        before = rss(pid)
        self.driver.socket.sendall(self.frame(field(2, b"\x12\x00" * n)))  # empty sequences
        with self.assertRaises(ConnectionError):
            self.driver.receive()
        self.assertLess(rss(pid, "VmHWM") - before, 160 << 20)
        self.driver = Driver(self.spawned)
        self.assertEqual(self.driver.case(CASES[0]), CASES[0]["greedy_ids"])

    def test_a_driver_that_does_not_read_is_dropped(self):
        sequences = [self.sequence(sampling={"logprobs": 64})] * self.driver.welcome.max_seqs
        data = self.frame(step.DriverFrame(
            step=step.Step(id=1, sequences=sequences)).SerializeToString())
        self.driver.socket.settimeout(0.2)
        try:
            while True:
                self.driver.socket.sendall(data)
        except OSError:
            pass
        self.assertTrue(self.d.client.healthy(""))
        self.serves(self.d)
        self.driver.socket.close()


# ---- the control API ----

class Control(Attack):
    def raw(self, d, method, body, stream=False):
        """A call with a request of these bytes; its status and text."""
        make = d.client.channel.unary_stream if stream else d.client.channel.unary_unary
        call = make(f"/ember.v1.Ember/{method}", request_serializer=lambda b: b,
                    response_deserializer=lambda b: b)
        try:
            result = call(body, timeout=60)
            if stream:
                list(result)
            return CODE.OK, ""
        except grpc.RpcError as error:
            return error.code(), error.details()

    def lists_parse(self, d):
        """A strict reader takes every list."""
        return d.client.ListModels().models, d.client.ListInstances().instances

    def test_names_and_texts_of_any_bytes(self):
        d = self.daemon("--standby=0", "--log-level=info", "--shutdown-timeout=0")
        path = field(1, TINY.encode())
        for what, method, body, stream, code, text in (
                ("name not UTF-8", "LoadModel", path + field(2, b"a\xff\xfe"), True, BAD, "UTF-8"),
                ("name overlong", "LoadModel", path + field(2, b"\xc0\xaf"), True, BAD, "UTF-8"),
                ("name half a surrogate", "LoadModel", path + field(2, b"\xed\xa0\x80"), True, BAD,
                 "UTF-8"),
                ("name with a newline", "LoadModel", path + field(2, b"a\nb"), True, BAD, "control"),
                ("name with C1 control", "LoadModel", path + field(2, b"a\xc2\x9bm"), True, BAD,
                 "control"),
                ("name of 10 kB", "LoadModel", path + field(2, b"x" * 10000), True, BAD, "10000"),
                ("path not UTF-8", "LoadModel", field(1, b"/nope\xff/x"), True, BAD, "UTF-8"),
                ("path of 10 kB", "LoadModel", field(1, b"/" + b"x" * 10000), True, BAD, "4095"),
                ("path too long below", "LoadModel", field(1, "/é".encode() * 900 + b"/x"), True,
                 CODE.NOT_FOUND, "é"),
                ("path relative", "LoadModel", field(1, b"a/b"), True, BAD, "absolute"),
                ("path of a file", "LoadModel", field(1, b"/etc/passwd"), True, CODE.NOT_FOUND,
                 "passwd"),
                ("holder not UTF-8", "SpawnInstance", field(3, b"\xff"), False, BAD, "holder"),
                ("model not UTF-8", "SpawnInstance", field(1, b"\xff"), False, BAD, "UTF-8"),
                ("model of 5 kB", "SpawnInstance", field(1, "é".encode() * 2500), False,
                 CODE.NOT_FOUND, "no model"),
                ("id not UTF-8", "StopInstance", field(1, b"\xff" * 99), False, BAD, "UTF-8"),
                ("standby 2^32-1", "LoadModel", path + varint(3 << 3) + varint(2 ** 32 - 1), True,
                 BAD, "256"),
                ("not a message", "GetStatus", b"\xff" * 99, False, CODE.INTERNAL, "parse"),
                ("a length beyond the request", "LoadModel", b"\x0a" + varint(2 ** 62) + b"x", True,
                 CODE.INTERNAL, "parse"),
                ("half a million unknown fields", "GetStatus", b"\x78\x01" * 500000, False, CODE.OK,
                 "")):
            with self.subTest(what):
                got, details = self.raw(d, method, body, stream)
                self.assertEqual(got, code, details)
                self.assertIn(text, details)
                self.lists_parse(d)
        self.assertEqual(self.raw(d, "LoadModel", path + field(2, "ünï/слово".encode()), True)[0],
                         CODE.OK)
        for holder in ("é" * 300, '"\n<3>emberd: evil="1', "x" * 500000):
            r = d.client.SpawnInstance(model="ünï/слово", holder=holder)
            shown = r.instance.lease_holder
            self.assertTrue(shown and len(shown.encode()) < 300)
            self.assertTrue(holder.replace("\n", "?").startswith(shown), shown)
            self.lists_parse(d)
            d.client.StopInstance(id=r.instance.id)
        self.assertFalse([line for line in d.text().splitlines() if line.startswith("<3>")])
        if not SANITIZED:
            self.assertLess(d.client.GetStatus().own_rss, 20 << 20)

    def test_watchers_that_do_not_read(self):
        d = self.daemon("--standby=0", "--log-level=warn")
        d.load()
        before = d.client.GetStatus().own_rss
        channels = []
        for _ in range(4):  # no iteration: grpcio reads no further than its window
            client = harness.Client(f"unix:{d.socket}")
            channels.append((client, [client.WatchInstances(timeout=600) for _ in range(50)]))
        for _ in range(6):
            got = [d.client.future("SpawnInstance", holder="x" * 4000) for _ in range(4)]
            for g in got:
                d.client.StopInstance(id=g.result().instance.id)
        if not SANITIZED:
            self.assertLess(d.client.GetStatus().own_rss - before, 16 << 20)
        for client, _ in channels:
            client.close()
        self.serves(d)

    def streams(self, d, n, headers):
        """Opens n streams on one raw connection; returns when all are sent or the daemon closed."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            s.connect(d.socket)
            try:
                s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
                for i in range(0, n, 500):
                    s.sendall(b"".join(
                        struct.pack(">I", len(headers))[1:] + b"\x01\x04" +
                        struct.pack(">I", 2 * k + 1) + headers for k in range(i, i + 500)))
            except OSError:
                return

    def test_a_hundred_thousand_streams(self):
        d = self.daemon("--standby=1", "--log-level=warn")
        self.serves(d)

        def literal(name, value):
            return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        headers = (literal(b":method", b"POST") + literal(b":scheme", b"http") +
                   literal(b":path", b"/ember.v1.Ember/SpawnInstance") +
                   literal(b":authority", b"x") + literal(b"content-type", b"application/grpc") +
                   literal(b"te", b"trailers"))
        before, fds = d.client.GetStatus().own_rss, len(d.fds())
        self.streams(d, 100000, headers)
        self.assertTrue(d.client.healthy(""))
        self.assertLess(d.client.GetStatus().own_rss - before, 8 << 20)
        d.wait_until(lambda: len(d.fds()) <= fds, "its connection is gone")
        self.serves(d)

    def test_many_connections_and_no_descriptors(self):
        d = self.daemon("--standby=0", "--log-level=error")
        self.serves(d)
        fds = len(d.fds())
        hard = resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE, (fds + 30, hard))
        crowd = []
        for _ in range(300):
            s = socket.socket(socket.AF_UNIX)
            s.setblocking(False)
            crowd.append(s)
            s.connect_ex(d.socket)
        self.fails(CODE.RESOURCE_EXHAUSTED, d.client.SpawnInstance, "descriptor|open files|socket")
        self.assertTrue(d.client.healthy(""))  # the connection that there is serves on
        for s in crowd:
            s.close()
        resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        d.wait_until(lambda: len(d.fds()) <= fds, "descriptors are back")
        self.serves(d)

    def test_clients_killed_in_mid_call(self):
        d = self.daemon("--standby=0", "--log-level=warn")
        d.client.GetStatus()
        fds = len(d.fds())
        vanish = ("import os, sys, harness\n"
                  "c = harness.Client('unix:' + sys.argv[1])\n"
                  "calls = [c.future('SpawnInstance') for _ in range(6)]\n"
                  "calls += [c.WatchInstances(), c.LoadModel(path=harness.TINY)]\n"
                  "c.GetStatus()\n"
                  "os.kill(os.getpid(), 9)\n")
        for _ in range(2):
            subprocess.run([sys.executable, "-c", vanish, d.socket],
                           cwd=os.path.dirname(os.path.abspath(__file__)))
        d.wait_until(lambda: d.model().warmth >= pb.PARKED and not d.model().starting,
                     "the load outlives them")
        self.serves(d)
        self.nothing_left(d, fds)


class Options(Attack):
    def test_backend_that_is_none(self):
        text = self.folder() + "/text.so"
        write_text("not a shared object")(text)
        for path in (text, "/nonexistent.so", "/dev/null", "libc.so.6", "nonsense"):
            d = self.daemon("--standby=0", f"--backend={path}")
            with self.subTest(path), self.assertRaises(grpc.RpcError) as caught:
                d.client.SpawnInstance()
            self.assertRegex(caught.exception.details(), "instance|backend")
            self.assertNotRegex(caught.exception.details(), "signal")
            self.assertTrue(d.client.healthy(""))
            self.nothing_left(d)
            d.stop()

    def test_instruction_set_of_nonsense(self):
        for isa in ("nonsense", "", "x" * 5000):
            d = self.daemon("--standby=0", env={"EMBER_ISA": isa})
            try:
                self.serves(d)
            except grpc.RpcError as error:
                self.assertRegex(error.details(), "there are no .* kernels; there are: baseline")
                self.assertNotIn("signal", error.details())
            self.assertTrue(d.client.healthy(""))
            d.stop()

    def refused(self, *options):
        run = subprocess.run([harness.EMBERD, *options], capture_output=True, timeout=60,
                             text=True)
        self.assertIn(run.returncode, (1, 2), run.stderr)
        self.assertTrue(run.stderr)
        return run.stderr

    def test_places_that_cannot_be(self):
        folder = self.folder()
        write_text("x")(f"{folder}/file")
        self.assertIn("at most 70 bytes", self.refused(f"--runtime-dir={folder}/{'x' * 100}"))
        self.assertIn("emberd.lock", self.refused(f"--runtime-dir={folder}/file"))
        ours = f"--runtime-dir={folder}/run"
        self.assertIn("108", self.refused(ours, f"--socket={folder}/{'x' * 100}").replace(
            "107", "108"))
        self.assertIn(f"{folder}/file", self.refused(ours, f"--socket={folder}/file"))
        self.assertTrue(os.path.exists(f"{folder}/file"))
        self.assertIn("none/s", self.refused(ours, f"--socket={folder}/none/s"))
        self.assertEqual(os.listdir(f"{folder}/run/instances"), [])


# ---- deaths ----


if __name__ == "__main__":
    unittest.main(verbosity=2)
