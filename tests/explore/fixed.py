"""The fixed programs: those that once found something, and a few that together have most pairs of parts."""

from __future__ import annotations

FOUND: dict[str, str] = {
    "fused-sgd-moves-no-half-precision-weight": (
        '{"data": {"train": 4}, "model": {"dtype": "float16"}, "optimizer": {"by_config": false, "fused": true}, '
        '"settings": {"batch_size": 1, "epochs": null, "steps": 1}}'
    ),
}
"""Programs for which a property did not hold, by what was wrong; each was mended."""

CHOSEN: tuple[str, ...] = (
    (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"augment": ["torch", "numpy", "random", '
        '"generator", "numpy_generator"], "form": "mapping", "source": "dataset", "train": 15, "val": 1}, '
        '"events": [{"at": 3, "kind": "infer"}, {"at": 4, "kind": "stop"}], "model": {"parts": [{"flag": true, '
        '"kind": "running"}, {"kind": "mask"}, {"kind": "memory"}]}, "optimizer": {"by_config": false, "kind": '
        '"momentum", "lr": 0.01}, "settings": {"accum_steps": 2, "async_mode": "disabled", "batch_size": 2, '
        '"checkpoint_interval": 3, "ema": {}, "epochs": null, "evaluate_interval": 3, "num_workers": 1, '
        '"schedule": {"kind": "wsd"}, "seed": 2, "shuffle": false, "steps": 1}, "state": [{"kind": "int", '
        '"where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "own_function", "sample_weights": true}, "data": {"train": 5, "val": 12}, '
        '"events": [{"kind": "infer"}, {"at": 4, "kind": "kill"}], "model": {"parts": [{"kind": "tanh"}, {"kind": '
        '"residual", "parts": [{"flag": true, "kind": "running"}]}, {"kind": "tanh"}, {"kind": "counter"}]}, '
        '"optimizer": {"by_config": false, "fused": true, "kind": "adam", "lr": 0.01, "weight_decay": 0.1}, '
        '"settings": {"accum_steps": 3, "checkpoint_backend": "dcp", "epochs": null, "max_grad_norm": 0.1, '
        '"schedule": {"interval": "validation", "kind": "constant"}, "steps": 3}, "state": [{"kind": "object", '
        '"where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "in_model"}, "data": {"form": "keywords", "source": "dataset", "train": 9, "val": '
        '5}, "events": [{"kind": "checkpoint"}], "model": {"dtype": "float16", "parts": [{"kind": "shared", '
        '"parts": [{"kind": "relu"}, {"kind": "tanh"}]}]}, "optimizer": {"kind": "adagrad", "lr": 0.01, '
        '"weight_decay": 0.1}, "settings": {"accum_steps": 3, "batch_size": 5, "ema": {"decay": 0.9}, "epochs": '
        'null, "keyed": "sample", "patience": 2, "seed": 3, "steps": 7}, "state": [{"kind": "tuple", "where": '
        '"runner"}, {"kind": "set", "where": "runner"}]}'
    ),
    (
        '{"data": {"form": "mapping", "sampler": "weighted", "source": "list", "train": 7}, "events": [{"at": 0, '
        '"kind": "kill"}, {"at": 2, "kind": "stop"}], "model": {"dtype": "float16", "parts": [{"kind": "dropout", '
        '"p": 0.5}, {"kind": "layer_norm"}, {"kind": "scale"}, {"flag": true, "kind": "running"}]}, "optimizer": '
        '{"by_config": false, "kind": "adagrad", "lr": 0.01, "weight_decay": 0.1}, "settings": {"batch_size": 6, '
        '"checkpoint_interval": 3, "drop_last": true, "epochs": null, "max_grad_value": 0.05, "num_workers": 1, '
        '"persistent_workers": true, "schedule": {"interval": "step", "kind": "constant"}, "seed": 2, "steps": '
        '7}, "state": [{"kind": "list", "where": "runner"}, {"kind": "dict", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"inputs": "image", "train": 9}, "events": '
        '[{"kind": "budget"}], "model": {"parts": [{"kind": "conv"}, {"kind": "tanh"}]}, "optimizer": {"groups": '
        'true, "kind": "adamw", "lr": 0.02}, "settings": {"batch_size": null, "checkpoint_interval": 3, "epochs": '
        '2, "global_batch_size": 9, "schedule": {"kind": "constant"}, "seed": 2}, "state": [{"kind": "list", '
        '"where": "runner"}, {"kind": "int", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"class_weights": true, "ignore_index": 1, "kind": "nll", "reduction": "sum"}, "data": '
        '{"inputs": "image", "nan_samples": [2], "train": 13}, "events": [{"kind": "kill"}], "model": {"parts": '
        '[{"kind": "spectral"}, {"kind": "scale"}]}, "optimizer": {"kind": "adamw", "lr": 0.02}, "settings": '
        '{"accum_steps": 3, "ema": {}, "epochs": null, "seed": 3, "skip_nonfinite_grad": true, "steps": 2}}'
    ),
    (
        '{"criterion": {"class_weights": true, "kind": "cross_entropy"}, "data": {"inputs": "tokens", "source": '
        '"list", "train": 16, "val": 5}, "events": [{"at": 3, "kind": "infer"}], "model": {"dtype": "float16", '
        '"parts": [{"kind": "frozen"}, {"kind": "linear"}]}, "optimizer": {"by_config": false, "kind": '
        '"lookahead"}, "settings": {"batch_size": 3, "checkpoint_interval": 1, "max_grad_norm": 0.1, '
        '"num_workers": 1, "persistent_workers": true, "seed": 3}}'
    ),
    (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"train": 16}, "model": {"parts": [{"kind": '
        '"memory"}, {"kind": "memory"}, {"kind": "counter"}]}, "optimizer": {"by_config": false, "kind": "two", '
        '"lr": 0.02}, "settings": {"accum_steps": 3, "batch_size": 6, "ema": {}, "epochs": null, '
        '"max_grad_value": 0.05, "precision": "bf16", "schedule": {"interval": "step", "kind": "constant"}, '
        '"seed": 2, "shuffle": true, "steps": 4}, "state": [{"kind": "array", "where": "runner"}]}'
    ),
    (
        '{"data": {"train": 4}, "optimizer": {"by_config": false}, "settings": {"batch_size": 1, "epochs": null, '
        '"steps": 1}}'
    ),
)
"""Programs of a search, chosen so that as many pairs of parts as possible run together."""
