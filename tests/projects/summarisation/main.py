"""Fine-tune a summariser: every setting is in a YAML file.

python -m tests.projects.summarisation.main fit --config tests/projects/summarisation/config.yaml
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from .data import DocstringData
from .model import Summariser


class SummarisationCLI(LightningCLI):
    """Links what the model and the data share; tests the best checkpoint after the training."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")
        parser.link_arguments("data.max_summary_tokens", "model.max_summary_tokens")

    def after_fit(self) -> None:
        self.trainer.test(self.model, self.datamodule, ckpt_path="best", weights_only=False)
        written = self.datamodule.tokenizer.batch_decode(self.model.summaries, skip_special_tokens=True)
        pairs = zip(self.datamodule.splits["test"], written, strict=True)
        report = [{"summary": example.summary, "written": text} for example, text in pairs]
        Path(self.trainer.log_dir, "summaries.json").write_text(json.dumps(report, indent=2))


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Run the command line and return it with its trainer, model and data."""
    return SummarisationCLI(
        Summariser, DocstringData, args=arguments, save_config_kwargs={"overwrite": True}, seed_everything_default=0
    )


if __name__ == "__main__":
    main()
