"""A server that speaks as OpenEnv does over HTTP and a WebSocket, and breaks off in every way."""

import contextlib
import json
import threading
from http import HTTPStatus

from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

SCHEMA = json.dumps({"action": {"properties": {"guess": {"type": "string"}}}}).encode()
ANSWER = {"observation": {"text": "1"}, "reward": 0.25, "done": False}


def answer(data):
    return json.dumps({"type": "observation", "data": data})


FAULTS = {
    "drops the socket": (lambda socket: socket.socket.shutdown(2), "connection"),
    "closes": (lambda socket: socket.close(), "connection"),
    "says nothing": (lambda socket: None, "timeout"),
    "no JSON": (lambda socket: socket.send("{"), "raised"),
    "bytes that are no UTF-8": (lambda socket: socket.send(b"\xff\xfe"), "raised"),
    "a text frame that is no UTF-8": (
        lambda socket: socket.send(b"\xff\xfe", text=True), "connection",
    ),
    "no answer in it": (lambda socket: socket.send("[]"), "raised"),
    "16 MB": (lambda socket: socket.send(answer({"x": "1" * (16 << 20)})), "connection"),
    "NaN reward": (lambda socket: socket.send(answer(ANSWER | {"reward": float("nan")})), "reply"),
    "no reward": (lambda socket: socket.send(answer({"observation": {}, "done": False})),
                  "raised"),
    "an error": (
        lambda socket: socket.send('{"type": "error", "data": {"code": "EXECUTION_ERROR"}}'),
        "raised",
    ),
}  # fmt: skip


class Server:
    """Answers on a port; fails at the second step of a session whose seed is odd.

    Args:
        fault: how; None for never.
        port: 0 for a free one.
    """

    def __init__(self, fault, port=0):
        self.fault, self.open, self.sockets, self.actions = fault, 0, [], []
        self.server = serve(
            self._talk, "127.0.0.1", port, process_request=self._describe, max_size=None
        )
        self.port = self.server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def _describe(self, connection, request):
        if request.path != "/schema":
            return None
        headers = Headers({"Content-Length": str(len(SCHEMA)), "Connection": "close"})
        return Response(HTTPStatus.OK, "OK", headers, SCHEMA)

    def _talk(self, socket):
        self.open += 1
        self.sockets.append(socket)
        steps, seed = 0, 0
        with contextlib.suppress(Exception):
            for line in socket:
                request = json.loads(line)
                if request["type"] == "close":
                    break
                if request["type"] == "reset":
                    steps, seed = 0, request["data"]["seed"]
                    socket.send(answer({"observation": {"text": "0-9="}, "reward": None,
                                         "done": False}))  # fmt: skip
                    continue
                steps += 1
                self.actions.append(request["data"])
                if self.fault and seed % 2 and steps == 2:
                    self.fault(socket)
                else:
                    socket.send(answer(ANSWER))
        self.open -= 1

    def stop(self):
        """Stop, and break off all sessions."""
        for socket in self.sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(2)
        self.server.shutdown()
        self.thread.join()
