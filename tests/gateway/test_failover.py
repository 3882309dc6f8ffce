# SPDX-License-Identifier: Apache-2.0
"""Instances die, again and again, or stop answering under 32 streams: every stream completes with
the text it would have had. Only a request that takes an instance with it twice in a row fails."""
import os
import signal
import threading
import time
import unittest

from gateway import DRAWN, Stack, together, wait_until

STREAMS = 32
WORK = [(f"{begin} {'and ' * (i % 7)}{i}", 60 + i) for i, begin in enumerate(
    ["Once upon a time", "The river", "In the morning", "He said that"] * (STREAMS // 4))]


class Streams:
    """All of WORK at once; `tokens` counts what has come so far, of each."""

    def __init__(self, g):
        self.results, self.tokens = [None] * STREAMS, [0] * STREAMS
        self.threads = [threading.Thread(target=self.one, args=(g, i)) for i in range(STREAMS)]
        for t in self.threads:
            t.start()

    def one(self, g, i):
        text, end = "", None
        prompt, n = WORK[i]
        try:
            for chunk in g.stream("/v1/completions", prompt=prompt, max_tokens=n, temperature=0,
                                  ignore_eos=True, return_token_ids=True):
                if chunk == "[DONE]":
                    end = chunk
                elif isinstance(chunk, dict):
                    text += chunk["choices"][0]["text"] if "choices" in chunk else f"<{chunk}>"
                    self.tokens[i] += 1
        except BaseException as e:  # noqa: B902: shows in the comparison
            text += repr(e)
        self.results[i] = (text, end)

    def have_moved(self, since):
        """Every stream has brought a token, or has ended, since it had so many."""
        return all(r or now > then for r, now, then in zip(self.results, self.tokens, since))

    def join(self):
        for t in self.threads:
            t.join(100)
        return self.results


class Failover(unittest.TestCase):
    def stack(self, *options, **more):
        stack = Stack(*options, **more)
        self.addCleanup(stack.stop)
        return stack

    def leased(self, stack, n=1):
        """The pid of an instance that is driven now, when there are n."""
        def pid():
            if not os.path.exists(f"{stack.folder}/leases"):
                return None
            lines = stack.leases().splitlines()
            return len(lines) == n and stack.emberd.pid_of(lines[0].split()[1])
        return wait_until(pid, f"{n} instances are leased")

    def disturb(self, stack, times, act, instances=1):
        """The undisturbed texts, and those with `act` done to the instance `times` times: each time
        when every stream has brought a token, since two deaths without one are blamed on it."""
        g = stack.gateway
        want = Streams(g).join()
        self.assertTrue(all(end == "[DONE]" and text for text, end in want))
        streams = Streams(g)
        total = sum(n for _, n in WORK)
        before = [0] * STREAMS
        for i in range(1, times + 1):
            wait_until(lambda: sum(streams.tokens) > total * i // (times + 3) and
                       streams.have_moved(before), f"part {i} has come")
            act(self.leased(stack, instances))
            wait_until(lambda: g.metric("ember_failovers_total") == i, f"failover {i}")
            before = list(streams.tokens)
        return want, streams.join()

    def test_several_kills(self):
        stack = self.stack()
        want, got = self.disturb(stack, 4, lambda pid: os.kill(pid, signal.SIGKILL))
        self.assertEqual(got, want)
        self.assertEqual(stack.gateway.metric("ember_failovers_total"), 4)
        self.assertEqual(stack.gateway.metric("vllm:kv_cache_usage_perc"), 0)

    def test_kills_without_anything_that_helps(self):
        """No prefix cache, no second step in flight, prompts in chunks."""
        stack = self.stack("--no-prefix-cache", "--no-token-refs", "--step-tokens=40")
        want, got = self.disturb(stack, 2, lambda pid: os.kill(pid, signal.SIGKILL))
        self.assertEqual(got, want)

    def test_what_is_drawn_goes_on_alike(self):
        """Seeds, penalties and log-probabilities know nothing of the instance."""
        stack = self.stack()
        g = stack.gateway
        calls = [lambda i=i: g.complete(WORK[i][0], **{**DRAWN, "max_tokens": 150}, seed=i)["choices"]
                 for i in range(8)]
        want = together(calls)
        before = g.metric("vllm:generation_tokens_total")

        def kill():
            for part in (1, 2):
                wait_until(lambda: g.metric("vllm:generation_tokens_total") >
                           before + part * 16 * 150 / 3, f"part {part} has come")
                os.kill(self.leased(stack), signal.SIGKILL)
                wait_until(lambda: g.metric("ember_failovers_total") == part, f"failover {part}")
        got = together(calls + [kill])
        self.assertEqual(got[:-1], want)
        self.assertGreaterEqual(g.metric("ember_replays_total"), 16)

    def test_stalls(self):
        """The watchdog replaces an instance that only stands still; it is ended for good."""
        stack = self.stack("--stall-timeout=2s")
        pids = []

        def stop(pid):
            pids.append(pid)
            os.kill(pid, signal.SIGSTOP)
        want, got = self.disturb(stack, 2, stop)
        self.assertEqual(got, want)
        self.assertEqual(stack.gateway.metric("ember_failovers_total"), 2)
        for pid in pids:
            wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "it is gone")

    def test_a_pause_is_no_idle_client(self):
        """A stream in which nothing comes for longer than client_timeout is not cut."""
        stack = self.stack("--client-timeout=1s")
        prompt, n = WORK[0]
        want = stack.gateway.stream_text(prompt, max_tokens=n, ignore_eos=True)
        chunks = stack.gateway.stream("/v1/completions", prompt=prompt, max_tokens=n,
                                      temperature=0, ignore_eos=True)
        text = next(chunks)["choices"][0]["text"]
        pid = self.leased(stack)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pid, signal.SIGCONT)
        rest = list(chunks)
        self.assertEqual(rest[-1], "[DONE]")
        text += "".join(c["choices"][0]["text"] for c in rest[:-1] if isinstance(c, dict))
        self.assertEqual(text, want[0])

    def test_on_two_instances(self):
        """Those of the one that dies go on on the other; the other's do not notice."""
        stack = self.stack("--min-instances=2", "--max-instances=2")
        self.leased(stack, 2)
        want, got = self.disturb(stack, 2, lambda pid: os.kill(pid, signal.SIGKILL), 2)
        self.assertEqual(got, want)

    def test_a_second_death_in_a_row_names_its_reason(self):
        """Each instance dies in its first step: who is alone in it fails, with a reason."""
        stack = self.stack(emberd_env={"EMBER_FAULT": "instance-step:1=kill"})
        status, _, reply = stack.gateway.request("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual(status, 500)
        self.assertIn("died while it ran this, and so did the one before",
                      reply["error"]["message"])

    def test_no_storm_of_spawns(self):
        """Instances that cannot live are asked for with pauses, and the gateway stays up."""
        stack = self.stack(emberd_env={"EMBER_FAULT": "instance-step:1=kill"})
        end = time.monotonic() + 2
        while time.monotonic() < end:
            stack.gateway.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
        self.assertEqual(stack.gateway.get("/ping")[0], 200)
        self.assertLess(stack.gateway.fds(), 60)


if __name__ == "__main__":
    unittest.main(verbosity=2)
