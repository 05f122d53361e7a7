"""Keep compiled libraries, and what is measured once on a machine, in a folder beside what inductor
keeps; and compile new ones in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

import fxpipe.random  # noqa: F401  (graphs may have its operators)
from fxpipe.errors import told
from fxpipe.extensions.inductor.library import Library, TensorLayout
from fxpipe.torchtools.state import processors

_CALLS_PYTHON = b"aoti_torch_proxy_executor_call_function("
"""Found in the code of libraries with Python operators, which only torch's loader can call."""

_loaded: WeakValueDictionary[tuple[Path, torch.device], Library] = WeakValueDictionary()


def folder() -> Path:
    """The folder of what is kept, in inductor's own cache folder; made if it is not there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    path = Path(cache_dir()) / "fxpipe"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key_of(text: str) -> str:
    """The key under which the folder keeps what was made for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def kept(text: str, make: Callable[[], Any]) -> Any:
    """Return a JSON value that is made once for a text on this machine."""
    path = folder() / f"{key_of(text)}.json"
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    value = make()
    with suppress(OSError):  # then the next call makes it again
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, path)  # at once: others never read a part
    return value


def find_library(key: str) -> Path | None:
    """The library of the graph with this key; None if it was not compiled yet."""
    paths = (folder() / f"{key}{suffix}" for suffix in (".so", ".pt2"))
    return next((path for path in paths if path.exists()), None)


def load_library(path: Path, device: torch.device) -> Library:
    """Load a library; all of its users share one object."""
    library = _loaded.get((path, device))
    if library is None:
        library = _loaded[path, device] = Library(path, device)
    return library


def keep_library(key: str, package: Path, device: torch.device) -> None:
    """Move a new package into the folder, or only its library if that can be called directly."""
    with zipfile.ZipFile(package) as files:
        names = files.namelist()
        code = b"".join(files.read(name) for name in names if name.endswith(".wrapper.cpp"))
        library = next((name for name in names if name.endswith(".so")), None)
        if library and device.type == "cpu" and _CALLS_PYTHON not in code:
            package = package.with_suffix(".so")
            package.write_bytes(files.read(library))
    os.replace(package, folder() / f"{key}{package.suffix}")


def compile_all(tasks: Sequence[tuple[Any, ...]], *, fork: bool) -> Iterator[tuple[int, str]]:
    """Run tasks in parallel, with one process for each processor. As soon as one is done, yield its
    number, and why it failed, or an empty text.

    Args:
        tasks: the arguments of ``compile_package`` for each.
        fork: see ``start_pool``.
    """
    if not tasks:
        return
    pool = start_pool(min(processors(), len(tasks)), fork=fork)
    try:
        numbers = {pool.submit(compile_package, *task): n for n, task in enumerate(tasks)}
        for done in as_completed(numbers):
            error = done.exception()
            yield numbers[done], done.result() if error is None else "its process has ended"
    finally:
        pool.shutdown()


def start_pool(count: int, *, fork: bool) -> Any:
    """Inductor's own pool of processes. They start sooner if they are forked of one, which may have
    initialised CUDA, so that they cannot use it."""
    from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool  # slow

    return SubprocPool(count, kind=SubprocKind.FORK if fork else SubprocKind.SPAWN)


def compile_package(source: str, target: str, options: dict[str, Any], default: str) -> str:
    """Compile an exported graph, and run it once. Returns why it could not be compiled, or an empty
    text.

    Args:
        source: the path of the graph.
        target: the path of the package to write.
        options: those of inductor.
        default: the default dtype.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.decomposition import decompositions

    # several threads of inductor's own code would add the rows of a gradient in any order
    decompositions.pop(torch.ops.aten.embedding_dense_backward.default, None)
    torch.set_default_dtype(getattr(torch, default))
    try:
        with torch.no_grad():
            program = torch.export.load(source)
            assert program.example_inputs is not None
            made: Any = program.graph.output_node().args[0]
            looks = [TensorLayout.of(node.meta["val"]) for node in made]
            aoti_compile_and_package(program, package_path=target, inductor_configs=options)
            loader: Any = torch._C._aoti.AOTIModelPackageLoader
            arguments = [*program.example_inputs[0]]
            results = loader(target, "model", True, 1, -1).boxed_run(arguments)
    except Exception as error:
        return told(error).splitlines()[0]
    if all(look.fits(result) for look, result in zip(looks, results, strict=True)):
        return ""
    return "inductor returns a value in another layout"


def can_compile() -> bool:
    """Whether there is a C++ compiler."""
    names = os.environ.get("CXX"), "g++", "clang++"
    return any(shutil.which(name) for name in names if name)
