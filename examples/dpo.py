"""Direct preference optimization (DPO) with LoRA adapters: the base model, without them, is the frozen reference.

    python examples/dpo.py                                                             # a tiny model, on the CPU
    python examples/dpo.py --model Qwen/Qwen3-32B --devices 4 --pairs pairs.jsonl \\
        --length 1024 --batch-size 32 --lr 5e-6 --max-steps 1000                       # GPUs of 24 GB

Each line of ``pairs.jsonl`` is an object with the texts ``prompt``, ``chosen`` and ``rejected``. Without ``--pairs`` a
prompt is the beginning of a paragraph of ``--text``; what follows there is chosen, and the same in capitals rejected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import PRECISION, PrintLosses, load, parser_for, text_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeTimeline


class PreferenceOptimization(L.LightningModule):
    """Makes chosen answers likelier than rejected ones, compared with the model that it began from."""

    def __init__(self, model: nn.Module, lr: float, beta: float) -> None:
        super().__init__()
        self.model, self.lr, self.beta = model, lr, beta

    def log_probs(self, batch: dict[str, Tensor]) -> Tensor:
        """Of the answers, as the model has them now: pairs x 2."""
        tokens, mask = batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1)
        logits = self.model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float()
        answer = batch["answer"][..., 1:]
        surprise = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return -(surprise.view_as(answer) * answer).sum(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # The reference comes first, so that the step ends with the layers that have a backward: the last of them run
        # once, forward and backward at a time.
        with torch.no_grad(), self.model.disable_adapter():
            before = self.log_probs(batch)
        gain = self.beta * (self.log_probs(batch) - before)
        margin = gain[:, 0] - gain[:, 1]
        loss = -F.logsigmoid(margin).mean()
        self.log_dict({"loss": loss, "accuracy": (margin > 0).float().mean()}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=self.lr, fused=True)


def pairs_of(path: Path | None, text: str) -> list[dict[str, str]]:
    """Prompts with a chosen and a rejected answer: those of a file, or made from a text."""
    if path is not None:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph) > 40]
    return [{"prompt": p[:20], "chosen": p[20:], "rejected": p[20:].upper()} for p in paragraphs]


def tokens_of(pair: dict[str, str], tokenizer: Any, length: int) -> list[tuple[Tensor, int]]:
    """For both answers the tokens of prompt and answer, and how many of them are the prompt's."""
    prompt = tokenizer(pair["prompt"])["input_ids"][: length // 2]
    rows = []
    for answer in (pair["chosen"], pair["rejected"]):
        tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
        rows.append((torch.tensor([*prompt, *tokens, tokenizer.eos_token_id][:length]), len(prompt)))
    return rows


def collate(pairs: list[list[tuple[Tensor, int]]], pad: int) -> dict[str, Tensor]:
    """Pads to pairs x 2 x tokens. A batch is split between pairs, so that both answers stay together."""
    rows = [row for pair in pairs for row in pair]
    tokens = pad_sequence([row for row, _ in rows], batch_first=True, padding_value=pad)
    places = torch.arange(tokens.shape[1])
    mask = places < torch.tensor([[len(row)] for row, _ in rows])
    answer = mask & (places >= torch.tensor([[num_prompt] for _, num_prompt in rows]))
    columns = {"input_ids": tokens, "attention_mask": mask.long(), "answer": answer.long()}
    return {name: column.unflatten(0, (-1, 2)) for name, column in columns.items()}


def main() -> None:
    """Trains adapters and saves them."""
    parser = parser_for(__doc__, max_steps=24, batch_size=8)
    parser.add_argument("--pairs", type=Path, help="file of pairs, one JSON object per line (default: made from text)")
    parser.add_argument("--beta", type=float, default=0.1, help="how close to stay to the reference (%(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (%(default)s)")
    parser.add_argument("--output", default="adapter", help="folder for the adapter (%(default)s)")
    args = parser.parse_args()
    if args.pairs is not None and not args.pairs.is_file():
        parser.error(f"there is no file {str(args.pairs)!r}")
    L.seed_everything(0)
    # What is frozen takes 2 bytes for each weight on the host; PEFT makes its adapters in float32.
    model, tokenizer = load(args.model, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = get_peft_model(model, lora)

    rows: Any = [tokens_of(pair, tokenizer, args.length) for pair in pairs_of(args.pairs, text_of(args.text))]
    if not rows:
        parser.error("there is no pair: give --pairs, or a --text with paragraphs of more than 40 characters")
    data = DataLoader(
        rows, args.batch_size, shuffle=True, collate_fn=lambda batch: collate(batch, tokenizer.pad_token_id)
    )
    count_tokens = lambda batch: int(batch["attention_mask"].sum())  # noqa: E731
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="roundpipe",  # the GPUs, or virtual devices on a machine without
        devices=args.devices,
        precision=PRECISION,
        max_steps=args.max_steps,
        callbacks=[PrintLosses(), RoundPipeTimeline(picture="dpo.svg", summary=True, tokens_of=count_tokens)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(PreferenceOptimization(model, args.lr, args.beta), data)
    model.save_pretrained(args.output)
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"\nOf the last batch, {accuracy:.0%} of the chosen answers have gained on the rejected ones.")
    print(f"The adapter is in {args.output}: load it with PeftModel.from_pretrained(base_model, {args.output!r}).")


if __name__ == "__main__":
    main()
