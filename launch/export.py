"""``python -m launch.export RUN [--step N] [--out FOLDER]``: a run's model as a Hugging Face folder.

Invariant (``tests/launch/test_export.py``): ``transformers`` loads model and tokenizer from the folder, its logits are
those of the training model, and it stops at the tokens at which the run's turns ended.

Exit status: 0 written, 2 the run or the folder cannot be used (one line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import expected, show

if TYPE_CHECKING:
    from megatron_ext.training.saved_run import SavedRun


def export(saved: SavedRun, out: Path) -> Path:
    """Writes the HF folder ``out``, whole or not at all. Raises ``FileExistsError`` when it exists."""
    from megatron_ext.harness.template import load_codec
    from megatron_ext.models.hf_io import save_hf
    from megatron_ext.models.hf_weights import export_tensors
    from megatron_ext.training.saved_run import loaded_model

    codec = load_codec(saved.tokenizer)
    stops = codec.stop_ids
    hf = saved.hf.with_token_ids(
        bos=codec.opening()[0] if codec.template.bos else None,
        eos=stops[0] if len(stops) == 1 else stops,
        pad=codec.pad_id,
    )
    with loaded_model(saved) as chunks:
        return save_hf(out, hf, export_tensors(chunks, hf), saved.tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.export", description="Writes a run's model as an HF folder."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, such as runs/quickstart")
    parser.add_argument("--step", type=int, help="checkpoint (default: the last; 0: what RL started from)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: RUN/export/step_N)")
    options = parser.parse_args(argv)
    # Imported once the command line is known to be right: the training stack takes seconds to load.
    from megatron_ext.training.saved_run import open_saved

    try:
        saved = open_saved(options.run, options.step)
        out = export(saved, options.out or saved.path / "export" / f"step_{saved.step}")
    except OSError as error:  # the folder exists, or cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 2
    except expected() as error:
        return show(error)
    print(f"step {saved.step} of {saved.path} written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
