#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The server against a client that is not ours: grpcio. Arguments: echo-server, echo.protoset."""
import os
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    print(f"skipped: {error} (python3-grpcio and python3-protobuf are needed)")
    sys.exit(77)

SERVER, PROTOSET = sys.argv[1:3]
POOL = descriptor_pool.DescriptorPool()
FACTORY = message_factory.MessageFactory(POOL)


def load(data):
    files = descriptor_pb2.FileDescriptorSet.FromString(data)
    for file in files.file:
        POOL.Add(file)


def message(name):
    return FACTORY.GetPrototype(POOL.FindMessageTypeByName(name))


load(open(PROTOSET, "rb").read())
Request, Response = message("ember.test.EchoRequest"), message("ember.test.EchoResponse")


def simple_file(name, package, fields):
    """A file of flat messages: {message: [(number, name, type, repeated)]}; type is a name or int."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    for type_name, members in fields.items():
        m = file.message_type.add(name=type_name)
        for number, field, kind, repeated in members:
            f = m.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, int):
                f.type = kind
            else:
                f.type, f.type_name = 11, f".{package}.{kind}"
    POOL.Add(file)


STRING, BYTES, INT32 = 9, 12, 5
# Written down here, not taken from the server: two ideas of the protocol must meet.
simple_file("t/health.proto", "t.health", {
    "Request": [(1, "service", STRING, False)],
    "Response": [(1, "status", INT32, False)],
})
simple_file("t/reflection.proto", "t.reflection", {
    "Request": [(1, "host", STRING, False), (3, "file", STRING, False), (4, "symbol", STRING, False),
                (6, "extensions", STRING, False), (7, "list", STRING, False)],
    "Files": [(1, "data", BYTES, True)],
    "Service": [(1, "name", STRING, False)],
    "Services": [(1, "service", "Service", True)],
    "Error": [(1, "code", INT32, False), (2, "text", STRING, False)],
    "Response": [(1, "host", STRING, False), (2, "request", "Request", False),
                 (4, "files", "Files", False), (6, "services", "Services", False),
                 (7, "error", "Error", False)],
})
HealthRequest, HealthResponse = message("t.health.Request"), message("t.health.Response")
ReflectionRequest, ReflectionResponse = message("t.reflection.Request"), message("t.reflection.Response")


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = os.path.join(cls.folder.name, "s")
        cls.server = subprocess.Popen([SERVER, cls.path], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)
        cls.port = int(cls.server.stdout.readline().split()[1])
        cls.channel = grpc.insecure_channel("unix:" + cls.path)

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        cls.server.stdin.close()
        status = cls.server.wait(10)
        cls.server.stdout.close()
        cls.folder.cleanup()
        assert status == 0, f"echo-server ended with {status}"

    def unary(self, name, channel=None, request=Request, response=Response, service="ember.test.Echo"):
        return (channel or self.channel).unary_unary(
            f"/{service}/{name}", request_serializer=request.SerializeToString,
            response_deserializer=response.FromString)

    def stream(self, name, request=Request, response=Response, service="ember.test.Echo"):
        return self.channel.unary_stream(
            f"/{service}/{name}", request_serializer=request.SerializeToString,
            response_deserializer=response.FromString)

    def fails(self, code, call, *args, **kwargs):
        with self.assertRaises(grpc.RpcError) as caught:
            result = call(*args, **kwargs)
            if not hasattr(result, "DESCRIPTOR"):
                list(result)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        return caught.exception

    def stats(self):
        return self.unary("Stats")(Request())

    def eventually(self, condition):
        for _ in range(500):
            if condition():
                return
            time.sleep(0.01)
        self.fail("it never happened")


class Calls(Case):
    def test_unary(self):
        self.assertEqual(self.unary("Echo")(Request(text="grüße")).text, "grüße")
        self.assertEqual(self.unary("Echo")(Request()).text, "")

    def test_tcp(self):
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            self.assertEqual(self.unary("Echo", channel)(Request(text="tcp")).text, "tcp")

    def test_large(self):
        request = Request(padding=b"x" * 3_000_000, size=3_500_000, text="big")
        self.assertEqual(len(self.unary("Echo")(request).padding), 3_500_000)

    def test_too_large(self):
        error = self.fails(grpc.StatusCode.RESOURCE_EXHAUSTED, self.unary("Echo"),
                           Request(padding=b"x" * (5 << 20)))
        self.assertIn("4194304", error.details())
        self.assertEqual(self.unary("Echo")(Request(text="still here")).text, "still here")

    def test_metadata(self):
        _, call = self.unary("Echo").with_call(Request(metadata="my-key"),
                                               metadata=[("my-key", "my value")])
        response = self.unary("Echo")(Request(metadata="my-key"), metadata=[("my-key", "my value")])
        self.assertEqual(response.text, "my value")
        self.assertIn(("echo-trailer", "with the answer"),
                      [(m.key, m.value) for m in call.trailing_metadata()])

    def test_header_list_limit(self):
        with self.assertRaises(grpc.RpcError):
            self.unary("Echo")(Request(), metadata=[("big", "x" * 20000)], timeout=5)
        self.assertEqual(self.unary("Echo")(Request(text="on")).text, "on")

    def test_every_status(self):
        for code in grpc.StatusCode:
            if code is not grpc.StatusCode.OK:
                error = self.fails(code, self.unary("Echo"),
                                   Request(status=code.value[0], text="100 % wahr: ä\n→ retry"))
                self.assertEqual(error.details(), "100 % wahr: ä\n→ retry")

    def test_unknown(self):
        self.fails(grpc.StatusCode.UNIMPLEMENTED, self.unary("Missing"), Request())
        self.fails(grpc.StatusCode.UNIMPLEMENTED, self.unary("Nope"), Request())
        self.fails(grpc.StatusCode.UNIMPLEMENTED, self.unary("Echo", service="no.Such"), Request())

    def test_malformed(self):
        call = self.channel.unary_unary("/ember.test.Echo/Echo",
                                        request_serializer=lambda b: b, response_deserializer=None)
        for bytes_ in (b"\xff\xff\xff", b"\x0a\x7fshort"):
            self.fails(grpc.StatusCode.INTERNAL, call, bytes_)

    def test_compressed(self):
        error = self.fails(grpc.StatusCode.UNIMPLEMENTED, self.unary("Echo"),
                           Request(text="z" * 2000), compression=grpc.Compression.Gzip)
        self.assertIn("identity", error.details())

    def test_deadline(self):
        start = time.monotonic()
        before = self.stats().cancelled
        self.fails(grpc.StatusCode.DEADLINE_EXCEEDED, self.unary("Hang"), Request(), timeout=0.1)
        self.assertLess(time.monotonic() - start, 2)
        self.eventually(lambda: self.stats().cancelled == before + 1 and self.stats().held == 0)

    def test_cancel(self):
        before = self.stats().cancelled
        future = self.unary("Hang").future(Request())
        self.eventually(lambda: self.stats().held == 1)
        future.cancel()
        self.eventually(lambda: self.stats().held == 0)
        self.assertEqual(self.stats().cancelled, before + 1)

    def test_delayed(self):
        self.assertEqual(self.unary("Echo")(Request(text="late", delay_ms=30), timeout=5).text, "late")

    def test_concurrent(self):
        futures = [self.unary("Echo").future(Request(text=str(i), delay_ms=i % 7)) for i in range(600)]
        self.assertEqual([f.result().text for f in futures], [str(i) for i in range(600)])

    def test_client_disappears(self):
        with grpc.insecure_channel("unix:" + self.path, [("x", 1)]) as channel:
            future = self.unary("Hang", channel).future(Request())
            self.eventually(lambda: self.stats().held == 1)
        self.eventually(lambda: self.stats().held == 0)
        self.assertTrue(future.done())


class Streams(Case):
    def test_count(self):
        got = list(self.stream("Count")(Request(count=5000, text="n", paced=True)))
        self.assertEqual([r.index for r in got], list(range(5000)))

    def test_empty_and_failing(self):
        self.assertEqual(list(self.stream("Count")(Request())), [])
        call = self.stream("Count")(Request(count=3, status=9, text="not now"))
        got = []
        with self.assertRaises(grpc.RpcError) as caught:
            for response in call:
                got.append(response.index)
        self.assertEqual(got, [0, 1, 2])
        self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        self.assertEqual(caught.exception.details(), "not now")

    def test_large_paced(self):
        got = list(self.stream("Count")(Request(count=200, size=100_000, paced=True)))
        self.assertEqual(sum(len(r.padding) for r in got), 20_000_000)

    def test_deadline(self):
        call = self.stream("Count")(Request(count=1000, delay_ms=20), timeout=0.2)
        got = 0
        with self.assertRaises(grpc.RpcError) as caught:
            for _ in call:
                got += 1
        self.assertGreater(got, 1)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        self.eventually(lambda: self.stats().held == 0)

    def test_cancel(self):
        call = self.stream("Count")(Request(count=1_000_000, delay_ms=5))
        next(call), next(call)
        call.cancel()
        self.eventually(lambda: self.stats().held == 0)

    def test_slow_reader(self):
        call = self.stream("Count")(Request(count=10_000, size=100_000))
        time.sleep(0.3)
        with self.assertRaises(grpc.RpcError) as caught:
            for _ in call:
                pass
        self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.assertIn("slowly", caught.exception.details())
        self.eventually(lambda: self.stats().held == 0)

    def test_chat(self):
        chat = self.channel.stream_stream("/ember.test.Echo/Chat",
                                          request_serializer=Request.SerializeToString,
                                          response_deserializer=Response.FromString)
        got = list(chat(iter([Request(text=str(i)) for i in range(300)])))
        self.assertEqual([r.text for r in got], [str(i) for i in range(300)])
        self.fails(grpc.StatusCode.ABORTED, chat,
                   iter([Request(text="a"), Request(status=10)] + [Request(text="b")] * 50))


class BuiltIn(Case):
    def check(self, service):
        return self.unary("Check", request=HealthRequest, response=HealthResponse,
                          service="grpc.health.v1.Health")(HealthRequest(service=service))

    def test_health(self):
        self.assertEqual(self.check("").status, 1)
        self.assertEqual(self.check("ember.test.Echo").status, 1)
        self.fails(grpc.StatusCode.NOT_FOUND, self.check, "nobody")

    def test_watch(self):
        def watch(service):
            return self.stream("Watch", request=HealthRequest, response=HealthResponse,
                               service="grpc.health.v1.Health")(HealthRequest(service=service))
        unknown = watch("nobody")
        self.assertEqual(next(unknown).status, 3)
        unknown.cancel()
        call = watch("ember.test.Echo")
        self.assertEqual(next(call).status, 1)
        for status in (2, 1):
            self.server.stdin.write(f"health {status}\n")
            self.server.stdin.flush()
            self.assertEqual(next(call).status, status)
        call.cancel()

    def reflect(self, version, requests):
        call = self.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=ReflectionRequest.SerializeToString,
            response_deserializer=ReflectionResponse.FromString)
        return list(call(iter(requests)))

    def test_reflection(self):
        for version in ("v1", "v1alpha"):
            services, by_symbol, by_type, by_method, by_name, bad, nothing = self.reflect(version, [
                ReflectionRequest(list="*"),
                ReflectionRequest(symbol="ember.test.Echo"),
                ReflectionRequest(symbol="ember.test.EchoRequest.text"),
                ReflectionRequest(symbol="grpc.health.v1.Health.Watch"),
                ReflectionRequest(file="ember/test/echo.proto"),
                ReflectionRequest(symbol="ember.test.Ech"),
                ReflectionRequest(file="no.proto", host="me"),
            ])
            names = {s.name for s in services.services.service}
            self.assertEqual(names, {"ember.test.Echo", "grpc.health.v1.Health",
                                     "grpc.reflection.v1.ServerReflection",
                                     "grpc.reflection.v1alpha.ServerReflection"})
            for answer in (by_symbol, by_type, by_name):
                file = descriptor_pb2.FileDescriptorProto.FromString(answer.files.data[0])
                self.assertEqual(file.name, "ember/test/echo.proto")
            self.assertIn(b"grpc/health/v1/health.proto", by_method.files.data[0])
            self.assertEqual((bad.error.code, nothing.error.code), (5, 5))
            self.assertEqual((nothing.host, nothing.request.file), ("me", "no.proto"))

    def test_every_service_resolves(self):
        """What a generic client does: from names to message types, over reflection alone."""
        names = [s.name for s in self.reflect("v1", [ReflectionRequest(list="")])[0].services.service]
        for name in names:
            pool = descriptor_pool.DescriptorPool()
            for data in reversed(self.reflect("v1", [ReflectionRequest(symbol=name)])[0].files.data):
                pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
            self.assertTrue(pool.FindServiceByName(name).methods)


class Stopping(Case):
    def test_graceful(self):
        future = self.unary("Echo").future(Request(text="finishes", delay_ms=200))
        hang = self.unary("Hang").future(Request())
        self.eventually(lambda: self.stats().held == 2)
        self.server.terminate()
        self.assertEqual(future.result(timeout=5).text, "finishes")
        self.assertEqual(hang.exception(timeout=5).code(), grpc.StatusCode.UNAVAILABLE)
        self.assertEqual(self.server.wait(5), 0)
        self.assertFalse(os.path.exists(self.path))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
