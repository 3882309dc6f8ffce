# SPDX-License-Identifier: Apache-2.0
"""Who may connect to the control socket."""
import os
import socket
import unittest

import harness


def answer_to_a_stranger(path, groups):
    """What a peer with a user and group of nobody's and these further groups reads: bytes; "" when
    it is turned away, None when the file's mode keeps it out. In a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(60)
                s.connect(path)
                s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                os.write(write, b"+" + s.recv(9))
        except (BrokenPipeError, ConnectionResetError):
            os.write(write, b"+")
        except PermissionError:
            os.write(write, b"-")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        said = f.read()
    os.waitpid(pid, 0)
    return said[1:] if said.startswith(b"+") else None


@unittest.skipUnless(os.geteuid() == 0, "only root can be somebody else")
class Strangers(harness.Case):
    def test_who_is_served(self):
        """By the peer's groups as the kernel knows them, not by its primary group alone."""
        d = self.daemon("--standby=0")
        os.chmod(d.folder, 0o755)
        ours = os.getegid()
        self.assertIsNone(answer_to_a_stranger(d.socket, []))  # the mode
        self.assertEqual(len(answer_to_a_stranger(d.socket, [ours])), 9)
        self.assertEqual(len(answer_to_a_stranger(d.socket, [12345, 23456, ours])), 9)
        os.chmod(d.socket, 0o666)  # as if somebody had opened it: the daemon looks by itself
        self.assertEqual(answer_to_a_stranger(d.socket, []), b"")
        self.assertEqual(answer_to_a_stranger(d.socket, [12345]), b"")
        self.assertEqual(len(answer_to_a_stranger(d.socket, [12345, ours])), 9)
        d.client.ListModels()


if __name__ == "__main__":
    unittest.main(verbosity=2)
