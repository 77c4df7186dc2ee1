"""llama.cpp as a peer of benchmarks: its server in this process, through the package xllamacpp.

It computes on the host with given threads. Its one slot is all that remembers a prompt: its cache of earlier prompts in
memory is off, so nothing is found there that a benchmark has erased.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .harness import BenchmarkError

PEER = "llama.cpp"
PACKAGE = "xllamacpp"
MISSING = f"{PACKAGE} is not installed or was left out: pip install {PACKAGE}"
"""Note of a report without this peer."""


def is_installed() -> bool:
    """Return whether the package is there. It is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def build() -> str:
    """Return the package's version, and the instruction sets that its build uses."""
    import xllamacpp

    features = [each.rpartition(":")[2].partition("=") for each in xllamacpp.get_system_info().split("|")]
    used = ", ".join(name.strip() for name, _, value in features if value.strip() == "1")
    return f"{PACKAGE} {xllamacpp.__version__}: {used}"


class LlamaServer:
    """A server of llama.cpp with one slot.

    Args:
        path: GGUF file.
        context: Tokens that the slot holds.
        threads: Threads that compute.
        saved: Folder of saved slots; None if none are saved.
    """

    def __init__(self, path: Path, *, context: int, threads: int, saved: Path | None = None) -> None:
        import xllamacpp

        parameters: Any = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = context, 1, 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.cache_ram_mib = 0
        parameters.verbosity = 0
        if saved is not None:
            parameters.slot_save_path = f"{saved}{os.sep}"  # names of files are appended as they are
        self._server: Any = xllamacpp.Server(parameters)

    def complete(self, prompt: list[int], tokens: int, *, reuse: bool = False) -> dict[str, float]:
        """Generate `tokens` tokens after `prompt`, and return llama.cpp's own timings and counts.

        Among them are ``prompt_ms`` and ``predicted_per_token_ms``, without the HTTP layer, and tokens of the prompt
        by whether the slot had them: ``cache_n`` and ``prompt_n``.

        Args:
            prompt: Tokens.
            tokens: Tokens to generate.
            reuse: Take what the slot holds of the prompt and do not compute it.

        Raises:
            BenchmarkError: The request was refused.
        """
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": reuse}
        answer = self._server.handle_completions(request)
        found: dict[str, Any] = json.loads(answer) if isinstance(answer, str) else answer
        if "timings" not in found:
            raise BenchmarkError(f"{PEER} refused a prompt of {len(prompt)} tokens: {found}")
        timings: dict[str, float] = found["timings"]
        return timings

    def save(self, name: str) -> int:
        """Write what the slot holds to the file `name`, and return its tokens. Raises BenchmarkError if refused."""
        return self._slot("save", name)["n_saved"]

    def restore(self, name: str) -> int:
        """Read the file `name` into the slot, and return its tokens. Raises BenchmarkError if refused."""
        return self._slot("restore", name)["n_restored"]

    def erase(self) -> int:
        """Empty the slot, and return the tokens that it held. Raises BenchmarkError if refused."""
        return self._slot("erase")["n_erased"]

    def _slot(self, action: str, name: str = "") -> dict[str, int]:
        """Send a request to the slot: xllamacpp has functions for completions alone."""
        address = urlsplit(self._server.listening_address)
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/slots/0?action={action}", json.dumps({"filename": name}), headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise BenchmarkError(f"{PEER} did not {action} its slot: {response.status} {body[:300].decode()}")
        found: dict[str, int] = json.loads(body)
        return found
