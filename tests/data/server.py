"""A web server on the loopback that misbehaves as it is told, and counts what it is asked for."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CUT, SILENT, STUCK, REFUSED, BUSY, ENCODED = "cut", "silent", "stuck", "refused", "busy", "encoded"
CHUNKED, DRIPS, DRIPS_CHUNKS, ENDLESS = "chunked", "drips", "drips chunks", "endless"
_CHUNKED = (CHUNKED, DRIPS_CHUNKS)


class Server:
    """Gives `files` by name; what is asked for by name is in `asked`.

    `manners` says how each name's requests are answered, the first first; then properly.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.manners: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.before_answer: Callable[[], None] = lambda: None
        self.half_way = threading.Event()
        self.go_on = threading.Event()
        self.address = ""

    def misbehave(self, how: str, times: int = 99) -> Server:
        for name in self.files:
            self.manners[name] = [how] * times
        return self


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(server, self)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    server.address = f"http://127.0.0.1:{http.server_port}/data"
    try:
        yield server
    finally:
        server.go_on.set()
        http.shutdown()
        http.server_close()
        thread.join()


def answer(server: Server, request: BaseHTTPRequestHandler) -> None:
    name = request.path.rpartition("/")[2]
    server.asked[name] += 1
    server.before_answer()
    content = server.files.get(name)
    manners = server.manners.get(name, [])
    how = manners.pop(0) if manners else ""
    if content is None or how == REFUSED:
        request.send_error(404)
        return
    if how == BUSY:
        request.send_error(503)
        return
    if how == SILENT:
        server.go_on.wait()
        return
    request.send_response(200)
    if how in _CHUNKED:
        request.send_header("Transfer-Encoding", "chunked")
    elif how != ENDLESS:
        request.send_header("Content-Length", str(len(content)))
    if how == ENCODED:
        request.send_header("Content-Encoding", "gzip")
    request.end_headers()
    with contextlib.suppress(ConnectionError):
        if how in (CUT, STUCK):
            request.wfile.write(content[: len(content) // 2])
            server.half_way.set()
            if how == STUCK:
                server.go_on.wait()
            return
        if how == ENDLESS:
            while True:
                request.wfile.write(bytes(1 << 16))
        if how in (DRIPS, DRIPS_CHUNKS):
            while not server.go_on.wait(0.01):
                request.wfile.write(b"1\r\nx\r\n" if how in _CHUNKED else b"x")
            return
        if how == CHUNKED:
            content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
        request.wfile.write(content)
