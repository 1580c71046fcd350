"""Triton kernels on a machine without a device: scripts that interpret or compile them, and what ptxas made of them.

Triton decides at import whether to interpret, so a test file runs itself as a script, once for each way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = (90, 100)
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a program can have on either architecture."""

Outcome = dict[str, str | None]
"""Of every check, its traceback or nothing."""


def environment(interpret: bool) -> dict[str, str]:
    """Variables of a script whose Triton interprets or compiles."""
    return os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": str(ROOT)}


def run_scripts(file: str) -> dict[str, Outcome]:
    """Outcomes of a test file's tasks, "interpret" and each architecture; all scripts run at once."""
    running = {}
    for task in ("interpret", *map(str, ARCHITECTURES)):
        command = [sys.executable, "-W", "ignore", file, task]
        running[task] = subprocess.Popen(
            command, env=environment(task == "interpret"), stdout=subprocess.PIPE, text=True
        )
    return {task: json.loads(process.communicate()[0]) for task, process in running.items()}


def report(checks: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """A script's part: run the checks and print their outcomes."""
    found: Outcome = {}
    for name, check in checks:
        try:
            check()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


def compiled(
    kernel: triton.JITFunction,
    architecture: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    even: Collection[str] = (),
    **options: int | bool | None,
) -> triton.compiler.CompiledKernel:
    """A kernel for an architecture: arguments are int32 unless typed; pointers and `even` ones divide by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in even]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=options)


def resource_usage(built: triton.compiler.CompiledKernel) -> str:
    """What cuobjdump says of registers, stack and local memory: "REG:40 STACK:0 ... LOCAL:0"."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return usage.stdout + usage.stderr
