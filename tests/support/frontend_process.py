"""A frontend process for tests and measurements, with the caller as its supervisor."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
from frontend_server import BOOT_ID, SECRET, TEMPLATE, byte_backend

from cearx.core.child import encode_launch, endpoint
from cearx.core.config import FrontendConfig, FrontendLaunch, ModelFiles
from cearx.core.link import Channel, configure
from cearx.core.messages import ChildToSupervisor


def write_model(folder: Path) -> None:
    """What a frontend needs of a model: the tokenizer of bytes and a chat template."""
    byte_backend().save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))


class Started:
    """A started `python -m cearx.frontend`; `end` it."""

    def __init__(self, folder: Path, model: Path, stream_interval: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.ROUTER)
        self._channel: Channel[None, ChildToSupervisor] = Channel(BOOT_ID, 0, ChildToSupervisor)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.set_inheritable(True)
        self._bind(folder)
        launch = FrontendLaunch(
            boot_id=BOOT_ID,
            runtime_dir=folder,
            log_level="info",
            config=FrontendConfig(served_model_name="served", stream_interval=stream_interval),
            model=ModelFiles(path=model, name="tiny"),
            frontend_index=0,
            hash_secret=SECRET,
            listen_fd=self._listener.fileno(),
        )
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cearx.frontend"],
            stdin=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(self._listener.fileno(),),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(encode_launch(launch))
        self.process.stdin.flush()

    def _bind(self, folder: Path) -> None:
        configure(self._reports)
        self._reports.bind(endpoint(folder, "supervisor"))

    def reports_until(self, kind: type) -> list[ChildToSupervisor]:
        found: list[ChildToSupervisor] = []
        while not found or not isinstance(found[-1], kind):
            assert self._reports.poll(15_000), f"no {kind.__name__} after {found}"
            report = self._channel.decode(self._reports.recv_multipart()[-1])
            assert report is not None
            found.append(report)
        return found

    def end(self) -> str:
        """Kills what is left; answers what the process logged."""
        self.process.kill()
        self.process.communicate()
        self._errors.seek(0)
        errors = self._errors.read()
        self._errors.close()
        self._listener.close()
        self._context.destroy(linger=0)
        return errors.decode()
