# SPDX-License-Identifier: Apache-2.0
"""Runs emberd for black-box tests: one daemon in a folder of its own, and a gRPC client for it.

The client is python3-grpcio (Debian), which nobody here wrote. Without it the tests are skipped.
"""
import array
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

try:
    import grpc
except ImportError:
    print("skipped: python3-grpcio is not installed (apt-get install python3-grpcio)")
    sys.exit(77)

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TINY = os.path.join(SOURCE, "models", "ember-tiny")
EMBERD = os.environ.get("EMBERD", os.path.join(SOURCE, "build", "daemon", "emberd"))
FAKE = os.environ.get("FAKE_CHILD", os.path.join(SOURCE, "build", "tests", "daemon", "fake_child"))
HAND_OVER = os.environ.get("HAND_OVER", os.path.join(os.path.dirname(FAKE), "hand_over"))

_generated = tempfile.mkdtemp(prefix="ember-pb-")
subprocess.run(
    ["protoc", f"--proto_path={SOURCE}/proto", f"--python_out={_generated}",
     "ember/v1/ember.proto", "ember/v1/step.proto", "grpc/health/v1/health.proto"],
    check=True)
# The package "grpc" is grpcio's: the health messages are loaded from their file, not as grpc.health.
sys.path.insert(0, _generated)
from ember.v1 import ember_pb2 as pb  # noqa: E402
from ember.v1 import step_pb2 as step  # noqa: E402
import importlib.util  # noqa: E402

_spec = importlib.util.spec_from_file_location(
    "ember_health_pb2", f"{_generated}/grpc/health/v1/health_pb2.py")
health = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(health)
shutil.rmtree(_generated, ignore_errors=True)

METHODS = {
    "LoadModel": (pb.LoadModelRequest, pb.LoadProgress, True),
    "UnloadModel": (pb.UnloadModelRequest, pb.UnloadModelResponse, False),
    "ListModels": (pb.ListModelsRequest, pb.ListModelsResponse, False),
    "SpawnInstance": (pb.SpawnInstanceRequest, pb.SpawnInstanceResponse, False),
    "StopInstance": (pb.StopInstanceRequest, pb.StopInstanceResponse, False),
    "ListInstances": (pb.ListInstancesRequest, pb.ListInstancesResponse, False),
    "WatchInstances": (pb.WatchInstancesRequest, pb.InstanceEvent, True),
    "GetStatus": (pb.GetStatusRequest, pb.GetStatusResponse, False),
}


class Client:
    """client.SpawnInstance(model="x") → response; .future is grpcio's; streams are iterators."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stubs = {}
        for name, (request, response, stream) in METHODS.items():
            make = self.channel.unary_stream if stream else self.channel.unary_unary
            self.stubs[name] = make(f"/ember.v1.Ember/{name}",
                                    request_serializer=request.SerializeToString,
                                    response_deserializer=response.FromString)
        self.health = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health.HealthCheckRequest.SerializeToString,
            response_deserializer=health.HealthCheckResponse.FromString)
        self.health_watch = self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health.HealthCheckRequest.SerializeToString,
            response_deserializer=health.HealthCheckResponse.FromString)

    def __getattr__(self, name):
        request = METHODS[name][0]
        stub = self.stubs[name]
        return lambda timeout=300, **fields: stub(request(**fields), timeout=timeout,
                                                 wait_for_ready=True)

    def future(self, method, timeout=300, **fields):
        return self.stubs[method].future(METHODS[method][0](**fields), timeout=timeout,
                                       wait_for_ready=True)

    def healthy(self, service):
        return self.health(health.HealthCheckRequest(service=service), timeout=60).status == 1

    def watch_health(self, service):
        """The stream of statuses: UNKNOWN 0, SERVING 1, NOT_SERVING 2, SERVICE_UNKNOWN 3."""
        return self.health_watch(health.HealthCheckRequest(service=service), timeout=300)

    def close(self):
        self.channel.close()


class NotifySocket:
    """Plays systemd: receives sd_notify messages and keeps the descriptors of FDSTORE=1."""

    def __init__(self, path, read=True):
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.stored = []  # (name, fd)
        self.seen = set()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        if read:
            self.thread.start()

    def _serve(self):
        while True:
            data, ancillary, _, _ = self.socket.recvmsg(65536, 8192)
            if not data:
                return
            fds = array.array("i")
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(payload[:len(payload) - len(payload) % fds.itemsize])
            fields = dict(line.split("=", 1) for line in data.decode().splitlines() if "=" in line)
            self.seen.update(fields)
            name = fields.get("FDNAME", "stored")
            if fields.get("FDSTOREREMOVE") == "1":
                for stored in [s for s in self.stored if s[0] == name]:
                    os.close(stored[1])
                    self.stored.remove(stored)
            if fields.get("FDSTORE") == "1":
                self.stored += [(name, fd) for fd in fds]
            else:
                for fd in fds:
                    os.close(fd)

    def settled(self, n):
        """Waits until n descriptors are stored."""
        Daemon.wait_until(lambda: len(self.stored) == n, f"{n} descriptors stored")

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"", self.path)
        self.thread.join()
        self.socket.close()
        for _, fd in self.stored:
            os.close(fd)
        self.stored = []


class Daemon:
    """emberd with fake children (or with real=True the real ones) in a folder of its own."""

    def __init__(self, *options, real=False, env=None, notify=None, pass_fds=(), folder=None,
                 default_model=TINY, wait=True):
        self.folder = folder or tempfile.mkdtemp(prefix="ember-test-")
        self.own_folder = folder is None
        self.control = os.path.join(self.folder, "control")
        self.libexec = os.path.join(self.folder, "libexec")
        self.run_dir = os.path.join(self.folder, "run")
        self.socket = os.path.join(self.folder, "emberd.sock")
        self.log_path = os.path.join(self.folder, "log")
        os.makedirs(self.control, exist_ok=True)
        os.makedirs(self.libexec, exist_ok=True)
        environment = dict(os.environ, FAKE_CONTROL=self.control)
        for unwanted in ("NOTIFY_SOCKET", "EMBER_FAULT", "EMBER_LIBEXEC"):
            environment.pop(unwanted, None)
        if not real:
            for name in ("ember-loader", "ember-instance"):
                if not os.path.exists(f"{self.libexec}/{name}"):
                    os.symlink(os.path.abspath(FAKE), f"{self.libexec}/{name}")
            environment["EMBER_LIBEXEC"] = self.libexec
        if notify:
            environment["NOTIFY_SOCKET"] = notify.path
        environment.update(env or {})
        command = [EMBERD, f"--runtime-dir={self.run_dir}", f"--socket={self.socket}",
                   f"--cache-dir={self.folder}/cache", f"--default-model={default_model}",
                   "--no-gateway", *(("--spawn-timeout=5m",) if real else ()), *options]
        if pass_fds:
            environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in pass_fds)
            command = [HAND_OVER, ",".join(str(fd) for _, fd in pass_fds), *command]
        self.log = open(self.log_path, "ab")
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stderr=self.log,
                                        stdin=subprocess.DEVNULL,
                                        pass_fds=[fd for _, fd in pass_fds])
        self.client = Client(f"unix:{self.socket}")
        if wait:
            self.wait_until(self.listens, "emberd listens")

    # ---- looking ----

    def listens(self):
        """True when the socket is served, or emberd has ended and never will."""
        with socket.socket(socket.AF_UNIX) as s:
            return s.connect_ex(self.socket) == 0 or self.process.poll() is not None

    def behave(self, role, *lines):
        """Writes the control file of "loader" or "instance"; without lines they behave."""
        path = os.path.join(self.control, role)
        with open(path + ".new", "w") as f:
            f.write("\n".join(lines) + "\n")
        os.rename(path + ".new", path)

    def text(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def children(self):
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(p) for p in f.read().split()]

    def kill_one(self, choose):
        """A child that `choose` takes out of their list, if there is one."""
        children = self.children()
        if children:
            try:
                os.kill(choose(children), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def fds(self):
        return sorted(os.listdir(f"/proc/{self.process.pid}/fd"), key=int)

    def model(self, name="ember-tiny"):
        return next(m for m in self.client.ListModels().models if m.name == name)

    def sockets(self):
        return sorted(os.listdir(f"{self.run_dir}/instances"))

    @staticmethod
    def wait_until(condition, what, seconds=60):
        """An event is waited for, however long the machine takes; only what never comes fails."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.005)
        raise AssertionError(f"not within {seconds} s: {what}")

    def load(self, path=TINY, **fields):
        """All progress messages of a load."""
        return list(self.client.LoadModel(path=path, **fields))

    def settled(self, name="ember-tiny", standby=None):
        def reached():
            m = self.model(name)
            return not m.starting and m.standby == (m.standby_target if standby is None else standby)
        self.wait_until(reached, f"{name} settles")

    # ---- ending ----

    def stop(self, sig=signal.SIGTERM, seconds=60):
        """Ends the daemon; returns its exit status."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"emberd did not end within {seconds} s:\n{self.text()}")
        self.log.close()
        if "Sanitizer" in self.text():
            raise AssertionError(self.text())
        if self.own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        return code


def alive(pid):
    """True while the process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except FileNotFoundError:
        return ""


class Case(unittest.TestCase):
    """A test that runs daemons; what it leaves running ends with it."""

    def daemon(self, *options, **more):
        d = Daemon(*options, **more)
        self.addCleanup(lambda: d.process.returncode is None and d.stop())
        return d

    def fails(self, code, call, text="."):
        """The call, or reading its stream, ends with this status and a text that the expression finds;
        returns the text."""
        with self.assertRaises(grpc.RpcError) as caught:
            result = call()
            if hasattr(result, "__next__"):
                list(result)
        error = caught.exception
        self.assertEqual(error.code(), code, error.details())
        self.assertRegex(error.details(), text)
        return error.details()

    def fake_driver(self, spawned, token=None):
        """Connects to a fake instance as its driver; any other token than the lease's is refused."""
        s = socket.socket(socket.AF_UNIX)
        self.addCleanup(s.close)
        s.settimeout(60)
        s.connect(spawned.instance.socket)
        s.sendall((token or spawned.lease.token).encode() + b"\n")
        self.assertEqual(s.recv(3), b"no\n" if token else b"ok\n")
        return s
