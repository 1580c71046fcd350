"""Offline inference: prompts in, text out, on one engine of this machine.

python examples/offline_inference.py --backend cpu                       # a tiny model, made on the spot
python examples/offline_inference.py --backend cpu --ep 8                # 8 ranks: dp 8, experts over all of them
python examples/offline_inference.py --backend cpu --ep 2 --dp 8         # 8 ranks, 4 groups with all the experts
python examples/offline_inference.py --backend cpu --ep 2 --cp 8         # 8 ranks, one attention replica over them
python examples/offline_inference.py --model FOLDER --ep 8               # a checkpoint on 8 GPUs
python examples/offline_inference.py --model deepseek-v4.1-flash --load-format dummy --ep 8
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.engine.runner import runner_backend
from deepinfer.errors import DeepinferError
from deepinfer.metrics.summary import summarize
from deepinfer.metrics.text import throughput_lines
from deepinfer.model.folder import tokenizer_file
from deepinfer.progress import progress_bar

TEXTS = ["Hello, my name is", "The capital of France is", "A mixture of experts", "Once upon a time"]
TOKEN_IDS = [[1, 2, 3, 5, 8, 13], [2, 4, 8, 16, 32, 64, 128], [7] * 12]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text offline.")
    parser.add_argument("--model", help="folder of a checkpoint, or a card with --load-format dummy [default: tiny]")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--backend", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--ep", type=int, default=1, help="ranks that hold all experts together")
    parser.add_argument("--dp", type=int, default=0, help="attention replicas; 0: max(1, ep / cp)")
    parser.add_argument("--cp", type=int, default=1, help="ranks of an attention replica")
    parser.add_argument("--nextn", type=int, default=0, help="drafts verified per request and step")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.7)
    return parser.parse_args()


def generate(model: str, args: argparse.Namespace) -> None:
    params = SamplingParams(temperature=args.temperature, top_p=0.95, max_tokens=args.max_tokens)
    prompts = TEXTS if tokenizer_file(model) else TOKEN_IDS
    with (
        LLM(
            model,
            backend=args.backend,
            load_format=args.load_format,
            expert_parallel_size=args.ep,
            data_parallel_size=args.dp,
            context_parallel_size=args.cp,
            nextn=args.nextn,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
        ) as llm,
        progress_bar("generating") as progress,
    ):
        outputs, run = llm.run(prompts, params, progress)
        speaks = llm.speaks  # under torchrun, one rank prints
        if speaks:
            print(f"{model} on {llm.deployment.cluster.accelerator.name}: {llm.deployment.layout}\n")
    if not speaks:
        return
    for output in outputs:
        show(output)
    if run is not None:
        for name, value in throughput_lines(summarize(run.record, math.inf, math.inf), args.nextn):
            print(f"{name:34}{value}")


def show(output: RequestOutput) -> None:
    completion = output.outputs[0]
    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    text = completion.text if completion.text is not None else completion.token_ids
    print(f"prompt: {prompt!r}\noutput: {text!r}  ({completion.finish_reason})\n")


def main() -> None:
    args = arguments()
    try:
        if args.model is not None:
            generate(args.model, args)
            return
        runner_backend(args.backend)  # says what is missing before a checkpoint is made with it
        from backends.torch_runtime.tiny import write_tiny_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            write_tiny_checkpoint(Path(folder), seed=0)
            generate(folder, args)
    except DeepinferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
