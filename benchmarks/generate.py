"""Generation on two cores: our engine against transformers on the same weights, and with MTP drafts against without.

The first part generates greedily with the `tiny` preset and random weights: prompts of 64 tokens, answers of 64; 1, 8
and 64 at a time. transformers runs its Step-3.7 text model with a generation head, in fp32: ``generate`` with its cache
and either of its attention implementations, and its continuous batching where that works. (Of the experts it has one
implementation for this model.) A ratio is against the fastest of them. What both generate is compared: it is the same,
up to where two logits are all but equal.

The second part needs a trained model (``--weights``, such as the run of `make curriculum`): drafts of 0 to all of its
MTP depths, sampled at temperature 1, on prompts that validation documents (``--data``) begin with. A ratio is tokens
per second with drafts over without.

    python -m benchmarks.generate [--weights runs/curriculum/train --data runs/curriculum/data]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from steptron.platform import malloc, threads

os.environ.update(threads.default_environment())  # read when torch is imported

import torch
from torch import Tensor

from benchmarks.harness import interleave, median, print_result, print_table
from steptron.checkpoint.released.model_config import write_model_config
from steptron.checkpoint.released.names import ReleasedTensor, released_tensors
from steptron.checkpoint.released.transformers_names import HEAD, to_transformers
from steptron.checkpoint.restore import restore_model
from steptron.checkpoint.weights import open_weights
from steptron.config.loader import load_section
from steptron.config.schema import ModelConfig, ParallelConfig, Section
from steptron.data.dataset import TokenDataset
from steptron.engine.engine import Engine, EngineOptions
from steptron.engine.request import Request
from steptron.engine.sampling import Sampling
from steptron.engine.statistics import Statistics
from steptron.model.assembly import StepModel
from steptron.model.layer_spec import model_spec
from steptron.model.stages import Stage
from steptron.model.transformer_config import transformer_config
from steptron.parallel.mesh import build_mesh
from steptron.platform import distributed
from steptron_kernels.select import select

THREADS = 2
PROMPT, ANSWER = 64, 64
BATCHES = (1, 8, 64)
TARGETS = {"batch_1": 2.0, "batch_64": 2.0}
CONFIGS = Path(__file__).parents[1] / "configs"
_NOT_THEIRS = {"architectures", "model_type", "torch_dtype"}


class _ModelFile(Section):
    model: ModelConfig


# ------------------------------------------------------------------------------------- the models


def random_model(config: ModelConfig) -> StepModel:
    """Whole, with weights that make logits differ, as a trained model's do."""
    spec = model_spec(config)
    kernels = select("auto", "fp32", torch.device("cpu"), torch.float32)
    engine = transformer_config(config, ParallelConfig(), torch.float32, kernels=kernels)
    model = StepModel(spec, Stage.whole(len(spec.layers)), engine, build_mesh(ParallelConfig()).groups).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.logical_tensors():
            scale = 0.0 if name.endswith("bias") or tensor.dim() == 1 else 0.05
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return model


def transformers_model(model: StepModel, config: ModelConfig, attention: str) -> Any:
    """The same weights in transformers' text model, with a head and what ``generate`` needs.

    Its text model has no class of its own that generates (5.24): the head is added here.
    """
    from transformers import GenerationMixin
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

    class TextModelWithHead(Step3p7PreTrainedModel, GenerationMixin):
        def __init__(self, text: Step3p7TextModel) -> None:
            super().__init__(Step3p7TextConfig(**settings))
            self.model = text
            self.lm_head = torch.nn.Linear(text.config.hidden_size, text.config.vocab_size, bias=False)

        def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **options: Any) -> Any:
            outputs = self.model(input_ids=input_ids, **options)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
            return MoeCausalLMOutputWithPast(logits=logits, cache=outputs.cache)

    raw: dict[str, Any] = write_model_config(config, "fp32", max_position_embeddings=4096)
    settings = {key: value for key, value in raw.items() if key not in _NOT_THEIRS}
    theirs = Step3p7TextConfig(**settings)
    theirs._attn_implementation = attention
    tensors = dict(model.logical_tensors())
    weights = {one.name: _rows(tensors, one) for one in released_tensors(model.spec)}
    named = to_transformers(weights)
    head = named.pop(HEAD)
    built = TextModelWithHead(Step3p7TextModel(theirs)).eval()
    built.model.load_state_dict(named)
    built.lm_head.weight.data.copy_(head)
    return built


def _rows(tensors: dict[str, Tensor], released: ReleasedTensor) -> Tensor:
    tensor, rows = tensors[released.parameter.name], slice(*released.matrix.rows)
    return (tensor[:, rows] if released.parameter.is_expert else tensor[rows]).detach().clone()


# ------------------------------------------------------------------------------------- contenders


def ours(model: StepModel, prompts_RP: Tensor, drafts: int = 0) -> list[list[int]]:
    """Greedy answers by our engine, which is made anew: nothing of a prompt is cached."""
    requests = [
        Request(tuple(prompt), Sampling(0.0), max_tokens=ANSWER, ignore_eos=True) for prompt in prompts_RP.tolist()
    ]
    return [[one.token for one in tokens] for tokens, _ in engine(model, drafts).generate(requests)]


def engine(model: StepModel, drafts: int, longest: int = PROMPT + ANSWER) -> Engine:
    options = EngineOptions(
        longest_sequence=longest,
        cache_tokens=max(BATCHES) * longest,
        sequences=max(BATCHES),
        step_tokens=1024,
        drafts=drafts,
    )
    return Engine(model, options)


@torch.no_grad()
def by_generate(model: Any, prompts_RP: Tensor) -> list[list[int]]:
    output = model.generate(
        prompts_RP,
        attention_mask=torch.ones_like(prompts_RP),
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[list[int]] = output[:, prompts_RP.shape[1] :].tolist()
    return found


@torch.no_grad()
def by_continuous_batching(model: Any, prompts_RP: Tensor) -> list[list[int]]:
    from transformers import GenerationConfig

    options = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(prompts_RP.tolist(), generation_config=options, progress_bar=False)
    return [list(one.generated_tokens) for one in outputs.values()]


def fastest(contenders: dict[str, Callable[[], object]]) -> str:
    """The name of the one that a single run of takes least, after a run to warm up; those that fail are left out."""
    seconds, failures = {}, []
    for name, run in contenders.items():
        try:
            run()
            start = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - start
        except Exception as error:  # what does not work on this machine is no contender
            failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    for failure in failures:
        print("does not work here:", failure)
    return min(seconds, key=lambda name: seconds[name])


def same_tokens(model: StepModel, prompts_RP: Tensor, one: Sequence[list[int]], other: Sequence[list[int]]) -> str:
    """How many answers are the same, and the largest gap of logits where others part."""
    gaps = []
    for prompt, a, b in zip(prompts_RP.tolist(), one, other, strict=True):
        if a != b:
            place = next(k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            request = Request((*prompt, *a[:place]), Sampling(0.0), max_tokens=1, alternatives=2, ignore_eos=True)
            ((answer, _),) = engine(model, 0).generate([request])
            (_, first), (_, second) = answer[0].alternatives
            gaps.append(first - second)
    text = f"{len(one) - len(gaps)} of {len(one)} answers the same"
    return text + (f"; where others part the two likeliest tokens differ by at most {max(gaps):.1e}" if gaps else "")


# ------------------------------------------------------------------------------------- the parts


def against_transformers(model: StepModel, config: ModelConfig, rounds: int) -> dict[str, float]:
    theirs = {name: transformers_model(model, config, name) for name in ("sdpa", "eager")}
    generator = torch.Generator().manual_seed(1)
    ratios: dict[str, float] = {}
    rows = []
    for batch in BATCHES:
        prompts_RP = torch.randint(0, config.vocab_size, (batch, PROMPT), generator=generator)
        contenders: dict[str, Callable[[], object]] = {
            f"generate, {name}": partial(by_generate, theirs[name], prompts_RP) for name in theirs
        }
        if batch > 1:
            contenders |= {
                f"continuous batching, {name}": partial(by_continuous_batching, theirs[name], prompts_RP)
                for name in theirs
            }
        best = fastest(contenders)
        seconds = interleave({"ours": partial(ours, model, prompts_RP), best: contenders[best]}, rounds, warmup=1)
        own, other = (batch * ANSWER / median(seconds[name]) for name in ("ours", best))
        ratios[f"batch_{batch}"] = statistics.median(b / a for a, b in zip(seconds["ours"], seconds[best], strict=True))
        rows.append([str(batch), f"{own:,.0f}", f"{other:,.0f}", best, f"{ratios[f'batch_{batch}']:.2f}"])
        answers = ours(model, prompts_RP), by_generate(theirs["eager"], prompts_RP)
        print(f"batch {batch}: {same_tokens(model, prompts_RP, *answers)}")
    columns = ["sequences", "our tokens/s", "transformers'", "its fastest way", "ratio"]
    print_table(f"Greedy, prompts of {PROMPT}, answers of {ANSWER} tokens", columns, rows)
    return ratios


def with_drafts(weights: Path, data: Path, rounds: int) -> dict[str, float]:
    model = restore_model(open_weights(weights), torch.device("cpu"))
    dataset = TokenDataset.open(data, "validation")
    documents = (dataset.document(number)[0].tolist() for number in range(dataset.num_documents))
    prompts = [tuple(tokens[:PROMPT]) for tokens in documents if len(tokens) >= PROMPT]
    ratios: dict[str, float] = {}
    rows = []
    for batch in BATCHES:
        chosen = [prompts[k % len(prompts)] for k in range(batch)]
        done: dict[int, Statistics] = {}
        counts = range(model.mtp_depths + 1)
        runs = {str(drafts): partial(_sampled, model, chosen, drafts, done) for drafts in counts}
        seconds = interleave(runs, rounds, warmup=1)
        for drafts in counts:
            ratio = statistics.median(a / b for a, b in zip(seconds["0"], seconds[str(drafts)], strict=True))
            if drafts:
                ratios[f"drafts_{drafts}_batch_{batch}"] = ratio
            had = done[drafts]
            accepted = " ".join(f"{a / d:.2f}" for a, d in zip(had.accepted_D, had.drafted_D, strict=True))
            speed = batch * ANSWER / median(seconds[str(drafts)])
            rows.append([str(batch), str(drafts), f"{speed:,.0f}", accepted or "-", str(had.steps), f"{ratio:.2f}"])
    columns = ["sequences", "drafts", "tokens/s", "accepted by depth", "steps", "against none"]
    print_table("MTP drafts, temperature 1", columns, rows)
    return ratios


def _sampled(model: StepModel, prompts: Sequence[tuple[int, ...]], drafts: int, done: dict[int, Statistics]) -> None:
    one = engine(model, drafts)
    one.generate([Request(own, Sampling(seed=n), max_tokens=ANSWER, ignore_eos=True) for n, own in enumerate(prompts)])
    done[drafts] = one.statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="trained model for the second part")
    parser.add_argument("--data", type=Path, help="dataset whose validation documents the prompts begin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["transformers", "drafts"])
    arguments = parser.parse_args()
    if (arguments.weights is None) != (arguments.data is None):
        parser.error("--weights and --data belong together")
    warnings.filterwarnings("ignore")
    malloc.keep_freed_memory()
    distributed.start("cpu", THREADS, timeout_seconds=60)
    ratios: dict[str, float] = {}
    if arguments.only != "drafts":
        config = load_section(CONFIGS / "model" / "tiny.yaml", _ModelFile).model
        ratios |= against_transformers(random_model(config), config, arguments.rounds)
    if arguments.weights is not None and arguments.only != "transformers":
        ratios |= with_drafts(arguments.weights, arguments.data, arguments.rounds)
    elif arguments.only != "transformers":
        print("no trained model was given (--weights, --data): drafts are not measured")
    print_result("generate", ratios, {name: target for name, target in TARGETS.items() if name in ratios})


if __name__ == "__main__":
    main()
