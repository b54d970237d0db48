"""A fake Hugging Face hub: a server that shows a directory as one repository.

Programs that use it run in separate processes, because huggingface_hub reads the address when it is
imported.
"""

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, content):
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def do_GET(self):
        server, path = self.server, self.path.split("?")[0]
        server.requests.append(self.path)
        api = f"/api/{server.kind}/{server.name}"
        files = f"/{server.name}" if server.kind == "models" else f"/{server.kind}/{server.name}"
        names = sorted(p for p in server.directory.rglob("*") if p.is_file())
        relative = [p.relative_to(server.directory).as_posix() for p in names]
        requested = server.directory / path.partition(f"/resolve/{COMMIT}/")[2]
        if not requested.is_file():
            requested = server.directory / path.partition("/resolve/main/")[2]
        if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in relative]
            self.answer_json({"id": server.name, "sha": COMMIT, "siblings": siblings})
        elif path == f"{api}/tree/{COMMIT}":
            sizes = zip(relative, (p.stat().st_size for p in names), strict=True)
            self.answer_json(
                [{"type": "file", "oid": "", "size": size, "path": name} for name, size in sizes]
            )
        elif path.startswith(f"{files}/resolve/") and requested.is_file():
            body = requested.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            self.answer(200, body, ETag=tag, X_Repo_Commit=COMMIT)
        else:
            self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@contextlib.contextmanager
def serve(directory, kind, name):
    """Serve a directory as a repository of `models` or `datasets`; yield address and requests."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.directory, server.kind, server.name, server.requests = directory, kind, name, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.requests
    finally:
        server.shutdown()
        server.server_close()


def run(script, argument, address, home, **environment):
    """Run a script with the hub at an address and the downloads in a directory."""
    settings = {"JAX_PLATFORMS": "cpu", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    settings |= {"HF_ENDPOINT": address, "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", script, argument],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **settings, **environment},
    )
