"""Processes that compile forms of launches into Triton's cache, for a GPU that none of them uses."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pkgutil import resolve_name
from typing import Any, NamedTuple

from sglang.srt.kernels.noted_launches import gpu_target
from sglang.srt.managers.compile_ahead.message import Report
from sglang.srt.utils.process_limits import die_with_parent


class Form(NamedTuple):
    """What Triton compiles for a launch: the arguments of `ASTSource`, and the options of `compile`."""

    kernel: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, fn: Any, compile: dict[str, Any]) -> Form:
        """Returns the form of a launch that `noted_launches` notes."""
        options = json.loads(compile["specialization_data"])["options"]
        return cls(
            f"{fn.fn.__module__}:{fn.fn.__qualname__}",
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        )


class Workers:
    """Up to `count` processes, forked from this one. Call it before there are threads."""

    def __init__(self, arch: str, count: int) -> None:
        """arch: the GPU ("sm_120")."""
        from triton.runtime.cache import triton_key

        triton_key()  # is kept: a hash of all of Triton, which each process would compute
        self._arch = arch
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=die_with_parent)
        self._pool.submit(os.getpid).result()
        self._forms: dict[str, Future[bool]] = {}

    def compile(self, form: Form) -> None:
        """Has a form compiled. After the death of a worker nothing is compiled any more."""
        try:
            self._forms[f"{form.kernel} {len(self._forms)}"] = self._pool.submit(compile_form, form, self._arch)
        except BrokenProcessPool as error:
            self._forms[form.kernel] = Future()
            self._forms[form.kernel].set_exception(error)

    def report(self) -> Report:
        """Waits until all are compiled, ends the processes, and reports."""
        report = Report()
        for name, future in self._forms.items():
            try:
                if future.result():
                    report.known += 1
                else:
                    report.compiled += 1
            except Exception as error:  # of the compiler, the disk, or because a process is gone
                report.failed.append(f"{name.partition(' ')[0]}: {type(error).__name__}: {error}")
        self._pool.shutdown()
        return report


def compile_form(form: Form, arch: str) -> bool:
    """Compiles a form as a launch on `arch` does. Returns whether it was in Triton's cache."""
    import triton
    from triton.compiler import ASTSource

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    source = ASTSource(resolve_name(form.kernel), form.signature, form.constants, form.attributes)
    triton.compile(source, target=gpu_target(arch), options=form.options)
    return hits[0]
