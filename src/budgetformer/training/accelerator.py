"""accelerate in the recipe's precision, or an error in words where this machine cannot compute in it."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

from budgetformer.errors import UsageError
from budgetformer.training.recipe import Recipe

_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"


def make_accelerator(recipe: Recipe) -> Accelerator:
    """accelerate with the recipe's precision; fp32 unless asked."""
    cpu = not torch.accelerator.is_available()
    if cpu and recipe.precision == "fp16":
        raise UsageError("precision=fp16 needs a GPU: use fp32 on a CPU")
    if cpu and recipe.precision == "bf16":  # some CPUs advertise instructions that their host forbids, and die
        probe = subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True)
        if probe.returncode:
            raise UsageError(
                "precision=bf16: a bf16 product ends the process on this CPU; use fp32, or try "
                "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
            )
    patient = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait while one evaluates and reports
    precision = "no" if recipe.precision == "fp32" else recipe.precision
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # a run before this one, in the same process, had another precision
    return Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=[patient])
