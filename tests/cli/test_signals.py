"""The first SIGINT or SIGTERM asks to stop; the second ends the process at once, even in the midst of native code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_train import SMALL
from tests.processes import command, forked
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from budgetformer.cli import process
from budgetformer.training import prepare


def native(*arguments: Any, **options: Any) -> Any:
    """Trains a tokenizer on one long word, which takes half a minute or more, without coming back to Python."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["x" * 300_000], trainers.WordPieceTrainer(vocab_size=2000, show_progress=False))


def sending(*signals: signal.Signals) -> Callable[[], None]:
    """Sends signals while the tokenizer is trained."""

    def arrange() -> None:
        def trained(*arguments: Any, **options: Any) -> Any:
            threading.Timer(0.5, lambda: [os.kill(os.getpid(), number) for number in signals]).start()
            native()
            os._exit(1)  # it was not ended: the first signal alone would give 130 from here on

        prepare.train_tokenizer = trained  # type: ignore[assignment]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    return arrange


@pytest.mark.parametrize(
    "signals", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)], ids=["int-term", "term-int"]
)
def test_a_second_signal_ends_native_code(signals: tuple[signal.Signals, ...], reviews: Path, tmp_path: Path) -> None:
    ended = forked("train", reviews, "-o", tmp_path / "run", *SMALL, before=sending(*signals))
    assert ended.returncode == 130
    assert "training the tokenizer on 160 texts" in ended.stderr
    assert command("train", reviews, "-o", tmp_path / "run", *SMALL) == 0  # what it left is no hindrance


def test_a_command_leaves_the_handlers_of_its_process_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with process.interruptible():
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
