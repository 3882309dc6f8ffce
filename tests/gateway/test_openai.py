# SPDX-License-Identifier: Apache-2.0
"""Installs the `openai` client from npm in the build folder and lets it drive the gateway."""
import os
import shutil
import subprocess
import sys
import tempfile

from gateway import TINY, Stack

HERE = os.path.dirname(os.path.abspath(__file__))


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def install(folder):
    """node_modules/openai of version 6 in the folder; kept for the next run."""
    if os.path.exists(f"{folder}/node_modules/openai/package.json"):
        return
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/package.json", "w") as f:
        f.write('{"name": "openai-client-test", "private": true}\n')
    done = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts",
                           "--fetch-retries=1", "openai@6"], cwd=folder, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=150)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        skip("npm cannot install openai@6: " + done.stdout.strip().splitlines()[-1][:200])


def main():
    for program in ("node", "npm"):
        if not shutil.which(program):
            skip(f"{program} is not installed")
    build = os.environ.get("EMBER_TEST_BUILD") or tempfile.mkdtemp(prefix="ember-npm-")
    folder = f"{build}/openai-client"
    try:
        install(folder)
    except subprocess.TimeoutExpired:
        skip("npm does not come to an end: is its registry there?")
    keys = f"{build}/keys"
    with open(keys, "w") as f:
        f.write("good-key\n")
    failed = drive(folder, "http", [f"--api-keys={keys}", "--admin", "--heartbeat=200ms",
                                    "--queue-timeout=3s", "--max-queue=40", "--max-body=1MiB"])
    if shutil.which("openssl"):
        failed |= over_tls(folder, build, keys)
    else:
        print("not over TLS: openssl is not installed")
    sys.exit(failed)


def drive(folder, scheme, options, only=(), env=None):
    stack = Stack(*options)
    try:
        return subprocess.run(["node", f"{HERE}/openai_client.mjs", folder,
                               f"{scheme}://127.0.0.1:{stack.gateway.port}/v1",
                               f"{TINY}/expected_text.json", *only],
                              timeout=200, env=dict(os.environ, **(env or {}))).returncode
    finally:
        stack.stop()


def over_tls(folder, build, keys):
    cert, key = f"{build}/client-cert.pem", f"{build}/client-key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", cert,
                    "-days", "2", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=IP:127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    return drive(folder, "https", [f"--api-keys={keys}", f"--tls-certificate={cert}",
                                   f"--tls-key={key}"],
                 ["chat", "chatStream", "completionStream", "errors", "abort"],
                 {"NODE_EXTRA_CA_CERTS": cert})


main()
