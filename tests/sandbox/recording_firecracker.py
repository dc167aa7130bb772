#!/usr/bin/env python3
"""Stands in for Firecracker: takes its requests over a real Unix socket, writes them down, and answers as it does.

What would be its guest is the agent as a process of this host. `$MOONLET_RECORD` is where requests are written,
`$MOONLET_AGENT` the agent. A file `full` in its folder makes it fail as on a full disk.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

state = {"state": "Not started"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, file=sys.stderr)

    def do_GET(self) -> None:
        self._answer(200, {"id": "anonymous-instance", "app_name": "Firecracker", **state})

    def do_PUT(self) -> None:
        self._take()

    def do_PATCH(self) -> None:
        self._take()

    def _take(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(os.environ["MOONLET_RECORD"], "a") as record:
            record.write(json.dumps([self.command, self.path, body]) + "\n")
        fault = obey(self.command, self.path, body)
        if fault:
            self._answer(400, {"fault_message": fault})
        else:
            self._answer(204, None)

    def _answer(self, code: int, fields: dict[str, Any] | None) -> None:
        data = b"" if fields is None else json.dumps(fields).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def obey(method: str, path: str, body: dict[str, Any]) -> str | None:
    """What is wrong with a request, or None."""
    if path == "/snapshot/create":
        if state["state"] != "Paused":
            return "Cannot save snapshot: the VM is running"
        if Path("full").exists():
            return "Cannot write the memory file: No space left on device (os error 28)"
        Path(body["snapshot_path"]).write_text("state")
        Path(body["mem_file_path"]).write_bytes(b"memory")
    elif path == "/snapshot/load":
        if Path(body["snapshot_path"]).read_text() != "state":
            return "Failed to restore from snapshot: bad magic"
        assert Path(body["mem_backend"]["backend_path"]).read_bytes() == b"memory"
        listen("agent.sock")
        state["state"] = "Paused"
    elif path == "/actions":
        listen("agent.sock")
        state["state"] = "Running"
    elif path == "/vm":
        state["state"] = "Running" if body["state"] == "Resumed" else body["state"]
    return None


def listen(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=serve_guests, args=(listener,), daemon=True).start()


def serve_guests(listener: socket.socket) -> None:
    while True:
        host, _ = listener.accept()
        line = b""
        while not line.endswith(b"\n"):
            line += host.recv(1)
        if line != b"CONNECT 5252\n":
            host.close()
            continue
        host.sendall(b"OK 1073741824\n")
        home = f"{os.environ['MOONLET_RECORD']}-{os.getpid()}"
        os.makedirs(home, exist_ok=True)
        stream = host.fileno()
        subprocess.Popen([os.environ["MOONLET_AGENT"], "--home", home], stdin=stream, stdout=stream)
        host.close()


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print("Firecracker v1.12.0\n")
    else:
        assert sys.argv[1] == "--api-sock"
        Server(sys.argv[2], Handler).serve_forever()
