"""Prefill and decode of a V4.1-Flash of true widths and few layers, with made-up weights, on this machine's GPUs.

    python benchmarks/engine_speed.py --layers 14 --requests 1,8,64,256 [--nextn 3] [--ep 2 --dp 2]

Every role of layer is there. Prints, per number of requests: steps/s, the three throughputs, a step's device time (from
the event right before it, which comes after everything that prepares it, to the one behind), the share of the time that
lies between two steps, preparation and idleness together, and what the cost model predicts for the step. Layers hold
all experts (7.2 GB each at ep 1), so that few fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.engine.arguments import EngineArguments, deploy
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import AT_ONCE, GenerationRequest, Runner, runner_backend
from deepinfer.engine.shape import ReplicaLoad, step_shape
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.model import hf
from deepinfer.model.numerics import EngramHash
from deepinfer.sampling.params import SamplingParams

CARD = Path(hf.__file__).parent / "cards" / "deepseek-v4.1-flash.json"


def shortened(num_layers: int, engram_rows: int = 1 << 22) -> dict[str, Any]:
    """The card with fewer layers: 2 window-only, Full and Reuse at ratio 2, Full, Reuse and Reindex at ratio 1.

    One n-gram table is left, of about `engram_rows` rows: the real ones take 100 GB each.
    """
    config: dict[str, Any] = json.loads(CARD.read_text())
    text = config["text_config"]
    encoder = max(num_layers // 2 - 2, 2)
    decoder = num_layers - 2 - encoder
    first = 2 + encoder
    reindex = list(range(first + 4, num_layers, 4)) or [num_layers - 2]
    text.update(
        num_hidden_layers=num_layers,
        compress_ratios=[0, 0, *[2] * encoder, *[1] * decoder, 0, 0, 0],
        kv_source_layer_ids=[2, first],
        index_source_layer_ids=[2, first, *reindex],
        candidate_source_layer_id=first,
        engram_layer_ids=[1],
        engram_vocab_size=engram_rows // 24,
        dspark_target_layer_ids=[num_layers - 3, num_layers - 2, num_layers - 1],
    )
    hashing = EngramHash((1,), (0,), engram_rows // 24, text["engram_compressed_vocab_size"], 4, 8, 2)
    text["engram_num_embeddings"] = [int(hashing.primes().sum())]
    return config


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--requests", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=4096, help="prompt tokens of a decoding request")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=8192, help="prompt tokens of the prefill measurement")
    for name, default in (("nextn", 0), ("ep", 1), ("dp", 0), ("cp", 1), ("step-tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--hardware", default="h200", help="catalog entry that predicts")
    parser.add_argument("--replay", default="off")
    options = parser.parse_args()
    counts = [int(n) for n in options.requests.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shortened(options.layers)))
        arguments = EngineArguments(
            model=folder,
            load_format="dummy",
            data_parallel_size=options.dp,
            expert_parallel_size=options.ep,
            context_parallel_size=options.cp,
            max_model_len=max(options.context + options.steps * (options.nextn + 1) + 64, options.prompt + 8),
            max_num_seqs=max(counts),
            max_tokens_per_step=options.step_tokens + max(counts) * (options.nextn + 1),
            nextn=options.nextn,
            replay=options.replay,
            prefix_cache=False,
        )
        backend = runner_backend(options.backend)
        model = hf.load_model(folder)
        plan = arguments.plan(model, "h200")
        source = arguments.source(model)
        deployment = deploy(plan, backend, source.max_model_len)
        if deployment.step_groups > 1:
            raise SystemExit("steps of several groups of ranks are not told apart: choose an ep that joins all ranks")
        runner = backend.load(deployment, source)
        try:
            ranks = deployment.layout.num_ranks
            replicas = ranks // deployment.layout.replica_ranks
            measure_prefill(runner, options.prompt, ranks, replicas, model.vocab_size)
            predict = Predictor(deployment, options.hardware)
            for count in counts:
                measure_decode(runner, count * replicas, options, ranks, model.vocab_size)
                predict.show(count, options)
        finally:
            runner.close()


class Predictor:
    """What the cost model says of the same step on an accelerator of the catalog."""

    def __init__(self, deployment: Deployment, hardware: str) -> None:
        accelerator = load_hardware(hardware)
        cluster = ClusterSpec(accelerator, deployment.layout.num_ranks)
        self._graph = replace(deployment, cluster=cluster).graph()
        self._costs, self._hardware = CostModel(accelerator), hardware

    def show(self, count: int, options: argparse.Namespace) -> None:
        """Print the step's predicted time."""
        context = options.context + options.steps * (options.nextn + 1) / 2
        load = ReplicaLoad(count, options.nextn, context)
        cost = step_cost(self._graph, step_shape(load, load.num_rows, load.num_rows, 8), self._costs)
        print(f"     predicted for {self._hardware}: {float(cost.seconds) * 1e3:.3f} ms")


def measure_prefill(runner: Runner, prompt: int, ranks: int, replicas: int, vocab: int) -> None:
    """Prompts alone, one token each."""
    for repeat in range(2):
        run = runner.generate(requests_of(2 * replicas, prompt, 1, vocab, seed=repeat), None, AT_ONCE)
    seconds = sum(run.record.steps.seconds)
    rows = sum(run.record.steps.prefill_rows)
    print(f"prefill of {prompt}-token prompts: {rows / seconds / ranks:,.0f} tokens/s/GPU")


def measure_decode(runner: Runner, count: int, options: argparse.Namespace, ranks: int, vocab: int) -> None:
    """Decode steps in which everybody decodes; twice, because the first run captures the graphs."""
    tokens = options.steps * (options.nextn + 1)
    for repeat in range(2):
        run = runner.generate(requests_of(count, options.context, tokens, vocab, seed=repeat), None, AT_ONCE)
    steps = run.record.steps
    alone = [i for i in range(1, len(steps.end_s)) if not steps.prefill_rows[i] and steps.decodes[i] == count][4:]
    if len(alone) < 4:
        print(f"{count} requests: too few steps in which all decode")
        return
    device = statistics.median(steps.seconds[i] for i in alone)
    wall = statistics.median(steps.end_s[i] - steps.end_s[i - 1] for i in alone if i - 1 in alone)
    kept = sum(steps.kept_tokens[i] for i in alone) / sum(steps.decodes[i] for i in alone)
    print(
        f"{count:4} requests, context {options.context}: {1 / wall:8.1f} steps/s, device {device * 1e3:.3f} ms, "
        f"{wall * 1e3:.3f} ms from end to end ({1 - device / wall:.1%} between steps), tau {kept:.2f}, "
        f"full acceptance {count * (1 + options.nextn) / wall / ranks:,.0f} tokens/s/GPU, "
        f"output {count * kept / wall / ranks:,.0f} tokens/s/GPU"
    )


def requests_of(count: int, prompt: int, tokens: int, vocab: int, seed: int) -> list[GenerationRequest]:
    """Random prompts, greedy, of a fixed length."""
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    return [GenerationRequest(tuple(generator.integers(0, vocab, prompt).tolist()), params) for _ in range(count)]


if __name__ == "__main__":
    main()
