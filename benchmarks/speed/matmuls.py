"""The matrix products of one training step of FCN and nothing else: no step can be faster.

    python -m benchmarks.speed.matmuls --shape criteo     # then `run 5` on standard input

Each cross layer has three products. With batch B and width D they are the forward product (B x D by D x D/2) and, in
the backward pass, those for the gradients of its input and of its weight. Operands are random, and results go into
buffers that already exist.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.speed.steps import serve

WIDTHS = {"criteo": 39 * 16, "avazu": 24 * 16}
LAYERS = {"criteo": 3 + 4, "avazu": 4 + 5}


def main() -> None:
    """Serve steps on standard input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=WIDTHS, required=True)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    D, layers = WIDTHS[args.shape], LAYERS[args.shape]
    # Every layer has its own operands, as in a model, so that none is still in the cache from the layer before.
    h_BD = [torch.randn(args.batch, D) for _ in range(layers)]
    weight_CD = [torch.randn(D // 2, D) for _ in range(layers)]
    grad_c_BC = [torch.randn(args.batch, D // 2) for _ in range(layers)]
    c_BC, grad_h_BD, grad_weight_CD = (
        torch.empty_like(grad_c_BC[0]),
        torch.empty_like(h_BD[0]),
        torch.empty_like(weight_CD[0]),
    )

    def step() -> None:
        for h, weight, grad_c in zip(h_BD, weight_CD, grad_c_BC, strict=True):
            torch.mm(h, weight.T, out=c_BC)
            torch.mm(grad_c, weight, out=grad_h_BD)
            torch.mm(grad_c.T, h, out=grad_weight_CD)

    with torch.inference_mode():
        serve(step, flops=layers * 3 * 2 * args.batch * D * (D // 2))


if __name__ == "__main__":
    main()
