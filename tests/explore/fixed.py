"""The fixed programs: those that once found something, and a few that together have most pairs of parts."""

from __future__ import annotations

FOUND: dict[str, str] = {
    "stopped-at-a-skipped-update-is-saved-past-it": (
        '{"criterion": {"kind": "bce"}, "data": {"inputs": "image", "nan_samples": [0], "sampler": "by_length", '
        '"train": 14, "val": 7}, "events": [{"at": 4, "kind": "stop"}], "model": {"parts": [{"kind": "spectral"}, '
        '{"kind": "mask"}]}, "settings": {"accum_steps": 3, "batch_size": 2, "epochs": 3, "skip_nonfinite_grad": true}}'
    ),
    "fused-sgd-moves-no-half-precision-weight": (
        '{"data": {"train": 4}, "model": {"dtype": "float16"}, "optimizer": {"by_config": false, "fused": true}, '
        '"settings": {"batch_size": 1, "epochs": null, "steps": 1}}'
    ),
    "evaluation-after-a-save-in-step-is-not-left-out": (
        '{"data": {"train": 8, "val": 7}, "events": [{"at": 0, "kind": "checkpoint"}, {"kind": "kill"}], "optimizer": {"kind": '
        '"adam", "lr": 0.01}, "settings": {"epochs": null, "evaluate_interval": 1, "seed": 3, "steps": 3}}'
    ),
    "evaluation-within-a-step-does-not-leave-the-update": (
        '{"data": {"train": 9, "val": 1}, "events": [{"at": 2, "kind": "evaluate"}, {"at": 2, "kind": "stop"}], "model": '
        '{"parts": [{"kind": "dropout", "p": 0.2}]}, "settings": {"accum_steps": 3, "batch_size": 1, "epochs": null, "steps": 4}}'
    ),
    "buffers-of-a-mesh-are-those-of-the-first-rank": (
        '{"data": {"train": 8}, "events": [{"kind": "stop"}], "model": {"parts": [{"kind": "running"}, {"kind": "linear"}]}, '
        '"settings": {"batch_size": 1}, "stack": {"kind": "parallel", "ranks": 2, "shard": 2}}'
    ),
    "resumed-run-of-three-ranks-has-the-same-bits": (
        '{"criterion": {"kind": "in_model"}, "data": {"form": "keywords", "inputs": "tokens", "source": "list", "train": 16}, '
        '"events": [{"kind": "kill"}], "model": {"dtype": "float64", "per_position": true}, "settings": {"batch_size": 3, '
        '"drop_last": false, "epochs": null, "seed": 3, "steps": 2}, "stack": {"ranks": 3}}'
    ),
    "position-in-metrics-file-is-that-of-the-rank-that-writes-it": (
        '{"data": {"source": "iterable", "train": 13}, "events": [{"at": 2, "kind": "stop"}], "settings": {"accum_steps": 3, '
        '"batch_size": 1, "epochs": null, "steps": 3}, "stack": {"kind": "parallel", "ranks": 4, "replicate": 2, "shard": 2}}'
    ),
    "deepspeed-does-not-divide-the-loss-that-a-model-returns": (
        '{"criterion": {"kind": "in_model"}, "data": {"form": "keywords", "inputs": "image", "source": "list", "train": 16}, '
        '"optimizer": {"lr": 0.01}, "settings": {"batch_size": null, "epochs": null, "global_batch_size": 6, "seed": 3, '
        '"steps": 2}, "stack": {"kind": "deepspeed"}}'
    ),
    "count-on-a-dataset-is-named-with-one-order-of-addition": (
        '{"data": {"source": "dataset", "train": 8}, "settings": {"batch_size": null, "global_batch_size": 4, '
        '"gradient_sum": "canonical", "micro_batch_size": 2}, "state": [{"kind": "plain", "where": "dataset"}]}'
    ),
    "stream-resumed-after-the-last-batch-of-a-pass-has-its-place": (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"form": "mapping", "source": "iterable", "train": 17, "val": 7}, '
        '"events": [{"at": 3, "kind": "stop"}], "settings": {"async_mode": "disabled", "batch_size": 5, "drop_last": false, "seed": 2}}'
    ),
    "batch-without-labels-of-a-model-that-returns-its-loss-and-logits": (
        '{"criterion": {"kind": "in_model"}, "data": {"form": "keywords", "inputs": "tokens", "ragged": true, "source": "list", '
        '"train": 6, "val": 5}, "model": {"parts": [{"kind": "linear"}], "tasks": true, "tied": true}, "optimizer": {"kind": '
        '"adagrad", "lr": 0.01}, "settings": {"accum_steps": 2, "batch_size": null, "drop_last": true, "global_batch_size": 6, '
        '"seed": 3}, "stack": {"find_unused": true, "ranks": 2}}'
    ),
    "ranks-of-ddp-that-use-different-blocks-end-with-an-error-of-words": (
        '{"criterion": {"kind": "bce"}, "data": {"source": "list", "train": 15}, "model": {"parts": [{"kind": "complex"}, '
        '{"kind": "sometimes", "parts": [{"kind": "complex"}]}]}, "stack": {"ranks": 2}}'
    ),
    "averages-on-shards-have-the-buffers-of-the-first-rank": (
        '{"criterion": {"kind": "l1"}, "data": {"form": "mapping", "source": "dataset"}, "events": [{"at": 2, "kind": '
        '"kill"}], "model": {"parts": [{"kind": "batch_norm"}]}, "optimizer": {"by_config": false}, "settings": '
        '{"accum_steps": 3, "batch_size": 3, "ema": {}, "epochs": 2, "seed": 2}, "stack": {"kind": "parallel", "ranks": '
        '2, "shard": 2}}'
    ),
    "averages-saved-in-parts-have-the-buffers-of-the-first-rank": (
        '{"criterion": {"kind": "l1"}, "data": {"form": "mapping", "source": "dataset"}, "events": [{"at": 2, "kind": '
        '"kill"}], "model": {"parts": [{"kind": "batch_norm"}]}, "optimizer": {"by_config": false}, "settings": '
        '{"accum_steps": 3, "batch_size": 3, "checkpoint_backend": "dcp", "ema": {}, "epochs": 2, "seed": 2}, "stack": '
        '{"ranks": 2}}'
    ),
}
"""Programs for which a property did not hold, by what was wrong; each was mended."""

CHOSEN: tuple[str, ...] = (
    (
        '{"criterion": {"kind": "cross_entropy", "reduction": "sum"}, "data": {"augment": ["torch", "numpy", '
        '"generator", "numpy_generator"], "form": "mapping", "inputs": "image", "nan_samples": [4], "source": '
        '"iterable", "train": 9, "val": 1}, "events": [{"at": 3, "kind": "checkpoint"}, {"at": 2, "kind": '
        '"stop"}], "model": {"dtype": "bfloat16", "parts": [{"kind": "relu"}]}, "optimizer": {"by_config": false, '
        '"fused": true, "kind": "adagrad", "lr": 0.02, "weight_decay": 0.1}, "settings": {"schedule": {"kind": '
        '"lambda"}, "skip_nonfinite_grad": true}, "state": [{"kind": "array", "where": "runner"}, {"kind": "int", '
        '"where": "runner"}]}'
    ),
    (
        '{"criterion": {"ignore_index": -100, "kind": "nll"}, "data": {"nan_samples": [13], "sampler": '
        '"weighted", "train": 14, "val": 7}, "model": {"parts": [{"kind": "relu"}, {"kind": "residual", "parts": '
        '[{"kind": "spectral"}]}, {"kind": "counter"}, {"kind": "sometimes", "parts": [{"kind": "layer_norm"}, '
        '{"kind": "memory"}]}]}, "optimizer": {"kind": "adamw", "lr": 0.01}, "settings": {"async_mode": '
        '"disabled", "batch_size": 5, "drop_last": true, "max_grad_norm": 0.1, "max_grad_value": 0.05, '
        '"schedule": {"kind": "exponential"}, "seed": 2, "skip_nonfinite_grad": true}, "state": [{"kind": "dict", '
        '"where": "runner"}, {"kind": "tuple", "where": "runner"}]}'
    ),
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
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"nan_samples": [1], "train": 13, "val": 5}, '
        '"model": {"parts": [{"kind": "dropout", "p": 0.2}, {"kind": "scale"}, {"kind": "layer_norm"}, {"kind": '
        '"spectral"}]}, "optimizer": {"by_config": false, "fused": true, "groups": true, "kind": "adagrad", "lr": '
        '0.01}, "settings": {"accum_steps": 3, "async_mode": "disabled", "batch_size": null, '
        '"checkpoint_backend": "dcp", "checkpoint_interval": 3, "drop_last": false, "epochs": null, '
        '"global_batch_size": 6, "patience": 2, "seed": 3, "skip_nonfinite_grad": true, "steps": 2}, "state": '
        '[{"kind": "dict", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"class_weights": true, "kind": "nll"}, "data": {"form": "nested", "inputs": "image", '
        '"nan_samples": [2], "source": "list", "train": 17, "val": 7}, "model": {"parts": [{"kind": "tanh"}]}, '
        '"optimizer": {"by_config": false, "kind": "nesterov", "lr": 0.02}, "settings": {"accum_steps": 3, '
        '"batch_size": 3, "ema": {"decay": 0.9, "interval": 2, "warmup": true}, "epochs": 2, "max_grad_norm": '
        '0.5, "max_grad_value": 0.05, "precision": "bf16", "schedule": {"interval": "step", "kind": "step"}, '
        '"seed": 2, "shuffle": false, "skip_nonfinite_grad": true}}'
    ),
    (
        '{"criterion": {"kind": "cross_entropy", "label_smoothing": 0.1, "reduction": "sum"}, "data": {"inputs": '
        '"tokens", "sampler": "by_length", "train": 17}, "model": {"dtype": "float64", "parts": [{"kind": '
        '"mask"}]}, "optimizer": {"by_config": false, "kind": "lookahead"}, "settings": {"accum_steps": 2, '
        '"batch_size": 2, "checkpoint_backend": "dcp", "checkpoint_interval": 1, "drop_last": false, "ema": '
        '{"interval": 2}, "epochs": 3, "max_grad_value": 0.05, "schedule": {"kind": "exponential"}, "seed": 2}, '
        '"state": [{"kind": "set", "where": "runner"}, {"kind": "tensor", "where": "runner"}]}'
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
        '{"criterion": {"kind": "in_model"}, "data": {"augment": ["torch", "numpy", "numpy_generator"], "form": '
        '"keywords", "source": "dataset", "train": 10, "val": 5}, "events": [{"kind": "checkpoint"}], "model": '
        '{"parts": [{"kind": "layer_norm"}, {"kind": "relu"}, {"kind": "group_norm"}, {"kind": "shared", "parts": '
        '[{"kind": "spectral"}]}]}, "optimizer": {"by_config": false, "kind": "lookahead", "lr": 0.03}, '
        '"settings": {"async_mode": "disabled", "batch_size": null, "drop_last": true, "ema": {"decay": 0.9, '
        '"warmup": true}, "global_batch_size": 10, "max_grad_norm": 0.1, "max_grad_value": 0.05, "seed": 2}, '
        '"state": [{"kind": "tensor", "where": "runner"}, {"kind": "enum", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "own_function", "sample_weights": true}, "data": {"form": "nested", "inputs": '
        '"image", "source": "iterable", "train": 15}, "model": {"dtype": "float64", "parts": [{"kind": '
        '"group_norm"}, {"kind": "tanh"}, {"kind": "layer_norm"}, {"kind": "sometimes", "parts": [{"kind": '
        '"frozen"}, {"kind": "frozen"}]}, {"kind": "sometimes", "parts": [{"kind": "counter"}]}]}, "optimizer": '
        '{"kind": "adagrad", "lr": 0.02, "weight_decay": 0.1}, "settings": {"accum_steps": 2, "batch_size": 6, '
        '"drop_last": false, "epochs": null, "max_grad_value": 0.05, "schedule": {"kind": "step"}, "seed": 2, '
        '"steps": 6}}'
    ),
    (
        '{"criterion": {"kind": "cross_entropy", "sample_weights": true}, "data": {"augment": ["torch", "numpy", '
        '"numpy_generator"], "form": "mapping", "nan_samples": [15], "source": "iterable", "target_dtype": '
        '"uint8", "train": 17, "val": 5}, "events": [{"kind": "checkpoint"}, {"kind": "evaluate"}], "model": '
        '{"parts": [{"flag": true, "kind": "running"}, {"kind": "tanh"}]}, "optimizer": {"lr": 0.03, '
        '"weight_decay": 0.1}, "settings": {"async_mode": "disabled", "batch_size": 1, "drop_last": true, '
        '"epochs": null, "evaluate_interval": 2, "patience": 2, "schedule": {"kind": "plateau"}, '
        '"skip_nonfinite_grad": true, "steps": 7}, "state": [{"kind": "dict", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "l1"}, "data": {"form": "mapping", "inputs": "image", "source": "list", "train": '
        '13, "val": 1}, "events": [{"at": 0, "kind": "infer"}], "model": {"parts": [{"kind": "layer_norm"}, '
        '{"kind": "complex"}]}, "optimizer": {"groups": true, "kind": "adagrad", "lr": 0.01, "weight_decay": '
        '0.1}, "settings": {"async_mode": "disabled", "batch_size": 6, "drop_last": false, "ema": {"decay": 0.9, '
        '"interval": 2}, "epochs": 2, "schedule": {"kind": "cosine", "warmup": 3}, "shuffle": false}, "state": '
        '[{"kind": "array", "where": "runner"}]}'
    ),
    (
        '{"data": {"inputs": "tokens", "ragged": true, "source": "iterable", "train": 11}, "events": [{"at": 3, '
        '"kind": "kill"}, {"at": 2, "kind": "stop"}], "model": {"parts": [{"kind": "attention"}], "tied": true}, '
        '"optimizer": {"groups": true, "kind": "adam", "lr": 0.02}, "settings": {"accum_steps": 2, "batch_size": '
        '5, "max_grad_norm": 0.1, "max_grad_value": 0.05, "seed": 2}, "state": [{"kind": "stateful", "where": '
        '"runner"}, {"kind": "tuple", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"inputs": "image", "train": 9}, "events": '
        '[{"kind": "budget"}], "model": {"parts": [{"kind": "conv"}, {"kind": "tanh"}]}, "optimizer": {"groups": '
        'true, "kind": "adamw", "lr": 0.02}, "settings": {"batch_size": null, "checkpoint_interval": 3, "epochs": '
        '2, "global_batch_size": 9, "schedule": {"kind": "constant"}, "seed": 2}, "state": [{"kind": "list", '
        '"where": "runner"}, {"kind": "int", "where": "runner"}]}'
    ),
    (
        '{"data": {"form": "mapping", "inputs": "image", "nan_samples": [7], "source": "list", "train": 11, '
        '"val": 5}, "model": {"dtype": "bfloat16", "parts": [{"kind": "noise"}, {"kind": "layer_norm"}, {"kind": '
        '"batch_norm"}, {"kind": "counter"}, {"kind": "linear"}]}, "optimizer": {"kind": "nesterov", "lr": 0.02}, '
        '"settings": {"batch_size": 3, "checkpoint_backend": "dcp", "checkpoint_interval": 2, "drop_last": false, '
        '"ema": {"decay": 0.9}, "epochs": null, "evaluate_interval": 3, "schedule": {"kind": "wsd"}, '
        '"skip_nonfinite_grad": true, "steps": 7}}'
    ),
    (
        '{"criterion": {"kind": "cross_entropy", "label_smoothing": 0.1}, "data": {"form": "nested", "inputs": '
        '"tokens", "source": "iterable", "train": 15, "val": 7}, "model": {"parts": [{"kind": "frozen"}, {"kind": '
        '"tanh"}], "per_position": true}, "optimizer": {"kind": "adam", "lr": 0.02}, "settings": {"batch_size": '
        '2, "drop_last": false, "epochs": null, "schedule": {"interval": "epoch", "kind": "plateau"}, "seed": 3, '
        '"steps": 7}, "state": [{"kind": "int", "where": "runner"}, {"kind": "np_int", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "own_module"}, "data": {"augment": ["torch"], "source": "dataset", "val": 1}, '
        '"model": {"parts": [{"kind": "linear"}]}, "optimizer": {"by_config": false, "fused": true, '
        '"weight_decay": 0.1}, "settings": {"accum_steps": 3, "batch_size": null, "drop_last": false, "ema": '
        '{"decay": 0.9, "interval": 2}, "epochs": null, "global_batch_size": 9, "keyed": "sample", '
        '"max_grad_norm": 0.1, "patience": 1, "seed": 3, "shuffle": true, "steps": 4}}'
    ),
    (
        '{"data": {"augment": ["torch", "numpy", "random", "generator", "numpy_generator"], "inputs": "image", '
        '"source": "dataset", "val": 12}, "events": [{"at": 4, "kind": "infer"}, {"kind": "kill"}], "model": '
        '{"parts": [{"kind": "conv"}]}, "optimizer": {"kind": "adam", "lr": 0.02, "weight_decay": 0.1}, '
        '"settings": {"accum_steps": 2, "batch_size": null, "global_batch_size": 8}, "state": [{"kind": "enum", '
        '"where": "runner"}, {"kind": "nested", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "own_function"}, "data": {"augment": ["torch", "numpy", "generator"], "form": '
        '"mapping", "source": "iterable", "train": 10}, "events": [{"kind": "stop"}], "model": {"dtype": '
        '"float64", "parts": [{"kind": "relu"}, {"kind": "linear"}, {"kind": "counter"}, {"kind": "frozen"}]}, '
        '"optimizer": {"by_config": false, "kind": "adagrad", "lr": 0.02}, "settings": {"accum_steps": 3, '
        '"batch_size": 5, "drop_last": false, "ema": {}, "epochs": null, "schedule": {"kind": "linear", "warmup": '
        '3}, "seed": 3, "steps": 7}}'
    ),
    (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"train": 16}, "model": {"parts": [{"kind": '
        '"memory"}, {"kind": "memory"}, {"kind": "counter"}]}, "optimizer": {"by_config": false, "kind": "two", '
        '"lr": 0.02}, "settings": {"accum_steps": 3, "batch_size": 6, "ema": {}, "epochs": null, '
        '"max_grad_value": 0.05, "precision": "bf16", "schedule": {"interval": "step", "kind": "constant"}, '
        '"seed": 2, "shuffle": true, "steps": 4}, "state": [{"kind": "array", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"class_weights": true, "kind": "cross_entropy"}, "data": {"inputs": "tokens", "source": '
        '"list", "train": 16, "val": 5}, "events": [{"at": 3, "kind": "infer"}], "model": {"dtype": "float16", '
        '"parts": [{"kind": "frozen"}, {"kind": "linear"}]}, "optimizer": {"by_config": false, "kind": '
        '"lookahead"}, "settings": {"batch_size": 3, "checkpoint_interval": 1, "max_grad_norm": 0.1, '
        '"num_workers": 1, "persistent_workers": true, "seed": 3}}'
    ),
    (
        '{"criterion": {"kind": "own_function", "sample_weights": true}, "data": {"inputs": "tokens", "source": '
        '"iterable", "train": 16}, "events": [{"at": 6, "kind": "budget"}, {"at": 3, "kind": "checkpoint"}], '
        '"model": {"dtype": "bfloat16", "parts": [{"kind": "counter"}, {"kind": "residual", "parts": [{"kind": '
        '"counter"}]}]}, "optimizer": {"by_config": false, "fused": true, "kind": "adamw", "lr": 0.02}, '
        '"settings": {"accum_steps": 2, "batch_size": 3, "drop_last": false, "ema": {"interval": 2}, "epochs": '
        'null, "max_grad_norm": 0.1, "schedule": {"interval": "step", "kind": "cosine"}, "seed": 3, "steps": 7}}'
    ),
    (
        '{"criterion": {"kind": "cross_entropy", "label_smoothing": 0.1, "reduction": "sum"}, "data": {"form": '
        '"nested", "source": "iterable", "target_dtype": "uint8", "train": 5, "val": 7}, "events": [{"at": 2, '
        '"kind": "evaluate"}, {"at": 2, "kind": "infer"}], "model": {"dtype": "bfloat16"}, "optimizer": {"kind": '
        '"adam", "lr": 0.02}, "settings": {"accum_steps": 3, "async_mode": "disabled", "batch_size": 3, '
        '"drop_last": true, "epochs": 3, "schedule": {"interval": "step", "kind": "exponential"}, "seed": 2}, '
        '"state": [{"kind": "enum", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "bce", "reduction": "sum"}, "data": {"inputs": "image", "source": "list", '
        '"train": 11, "val": 12}, "model": {"parts": [{"kind": "tanh"}, {"kind": "dropout", "p": 0.2}, {"kind": '
        '"dropout", "p": 0.2}, {"kind": "dropout", "p": 0.5}, {"kind": "shared", "parts": [{"kind": "tanh"}, '
        '{"kind": "noise"}]}]}, "optimizer": {"by_config": false, "kind": "nesterov", "lr": 0.02, "weight_decay": '
        '0.1}, "settings": {"batch_size": null, "drop_last": false, "epochs": null, "evaluate_interval": 2, '
        '"global_batch_size": 4, "schedule": {"kind": "plateau"}, "steps": 6}, "state": [{"kind": "tuple", '
        '"where": "runner"}]}'
    ),
    (
        '{"criterion": {"ignore_index": -100, "kind": "nll", "reduction": "sum"}, "data": {"augment": ["torch", '
        '"numpy", "random", "generator", "numpy_generator"], "form": "mapping", "source": "iterable", "train": 8, '
        '"val": 5}, "events": [{"at": 3, "kind": "stop"}], "model": {"parts": [{"kind": "tanh"}, {"kind": '
        '"counter"}, {"kind": "layer_norm"}, {"kind": "mask"}]}, "optimizer": {"by_config": false, "groups": '
        'true, "kind": "nesterov", "lr": 0.02}, "settings": {"accum_steps": 3, "batch_size": 6, "drop_last": '
        'true, "ema": {"interval": 2}, "epochs": null, "max_grad_value": 0.05, "schedule": {"kind": "plateau"}, '
        '"seed": 2, "steps": 5}}'
    ),
    (
        '{"criterion": {"ignore_index": 1, "kind": "cross_entropy"}, "data": {"inputs": "tokens", "ragged": true, '
        '"source": "list", "train": 14, "val": 12}, "events": [{"at": 3, "kind": "evaluate"}, {"at": 4, "kind": '
        '"kill"}], "model": {"tied": true}, "optimizer": {"kind": "nesterov", "lr": 0.01}, "settings": '
        '{"async_mode": "disabled", "ema": {"decay": 0.9, "interval": 2}, "epochs": null, "evaluate_interval": 3, '
        '"precision": "bf16", "steps": 5}, "state": [{"kind": "int", "where": "runner"}, {"kind": "np_int", '
        '"where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "own_function"}, "data": {"sampler": "weighted", "train": 17, "val": 5}, "model": '
        '{"parts": [{"kind": "memory"}, {"kind": "noise"}]}, "optimizer": {"by_config": false, "fused": true, '
        '"lr": 0.03}, "settings": {"accum_steps": 3, "batch_size": 1, "checkpoint_interval": 1, "epochs": null, '
        '"evaluate_interval": 3, "max_grad_norm": 0.5, "patience": 1, "schedule": {"kind": "lambda"}, "seed": 2, '
        '"steps": 2}}'
    ),
    (
        '{"criterion": {"kind": "nll"}, "data": {"form": "nested", "inputs": "image", "sampler": "by_length", '
        '"source": "list", "target_dtype": "uint8", "train": 14}, "model": {"parts": [{"kind": "relu"}, {"kind": '
        '"conv"}, {"kind": "batch_norm"}]}, "optimizer": {"kind": "adagrad", "lr": 0.01}, "settings": '
        '{"accum_steps": 2, "async_mode": "disabled", "epochs": null, "seed": 2, "steps": 2}}'
    ),
    (
        '{"criterion": {"reduction": "sum"}, "data": {"form": "mapping", "nan_samples": [5], "source": "list", '
        '"val": 1}, "optimizer": {"kind": "rmsprop", "lr": 0.02, "weight_decay": 0.1}, "settings": {"batch_size": '
        '3, "checkpoint_interval": 2, "epochs": 2, "max_grad_norm": 0.5, "precision": "fp16", "seed": 2}}'
    ),
    (
        '{"data": {"inputs": "image", "nan_samples": [15], "train": 16, "val": 12}, "events": [{"at": 2, "kind": '
        '"budget"}, {"at": 2, "kind": "evaluate"}], "model": {"parts": [{"kind": "group_norm"}, {"kind": '
        '"dropout", "p": 0.5}, {"kind": "noise"}, {"kind": "group_norm"}]}, "optimizer": {"kind": "momentum", '
        '"lr": 0.01, "weight_decay": 0.1}, "settings": {"accum_steps": 3, "batch_size": 2, "epochs": null, '
        '"evaluate_interval": 3, "max_grad_value": 0.05, "schedule": {"kind": "linear", "warmup": 1}, "seed": 2, '
        '"skip_nonfinite_grad": true, "steps": 4}}'
    ),
    (
        '{"criterion": {"kind": "nll", "reduction": "sum"}, "data": {"form": "mapping", "inputs": "image", '
        '"source": "iterable", "train": 4}, "model": {"parts": [{"kind": "memory"}, {"kind": "dropout", "p": '
        '0.2}]}, "optimizer": {"by_config": false, "kind": "lookahead"}, "settings": {"accum_steps": 2, '
        '"async_mode": "disabled", "ema": {"interval": 2}}, "state": [{"kind": "object", "where": "runner"}, '
        '{"kind": "int", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"reduction": "sum"}, "data": {"form": "mapping", "inputs": "tokens", "source": "dataset", '
        '"train": 16, "val": 1}, "events": [{"at": 0, "kind": "checkpoint"}, {"at": 0, "kind": "kill"}], "model": '
        '{"parts": [{"kind": "spectral"}, {"kind": "memory"}], "per_position": true}, "optimizer": {"kind": '
        '"adam", "lr": 0.01, "weight_decay": 0.1}, "settings": {"accum_steps": 2, "async_mode": "disabled", '
        '"batch_size": 1, "checkpoint_interval": 3, "epochs": 2, "schedule": {"interval": "validation", "kind": '
        '"constant", "warmup": 2}, "seed": 3, "shuffle": false}}'
    ),
    (
        '{"criterion": {"ignore_index": -100, "kind": "nll", "reduction": "sum"}, "data": {"form": "nested", '
        '"source": "list", "train": 11, "val": 1}, "events": [{"at": 4, "kind": "kill"}, {"at": 2, "kind": '
        '"stop"}], "model": {"dtype": "bfloat16", "parts": [{"kind": "group_norm"}, {"kind": "layer_norm"}, '
        '{"kind": "memory"}, {"kind": "scale"}]}, "optimizer": {"by_config": false, "kind": "rmsprop", "lr": '
        '0.01, "weight_decay": 0.1}, "settings": {"accum_steps": 3, "checkpoint_interval": 2, "epochs": null, '
        '"evaluate_interval": 2, "schedule": {"kind": "plateau"}, "shuffle": true, "steps": 7}}'
    ),
    (
        '{"criterion": {"kind": "l1"}, "data": {"nan_samples": [2], "train": 7}, "optimizer": {"kind": "adagrad", '
        '"lr": 0.02}, "settings": {"accum_steps": 2, "batch_size": 6, "ema": {}, "epochs": 2, "max_grad_norm": '
        '0.1, "num_workers": 1, "persistent_workers": true, "schedule": {"interval": "epoch", "kind": "linear"}, '
        '"seed": 2, "shuffle": true, "skip_nonfinite_grad": true}, "state": [{"kind": "int", "where": "runner"}, '
        '{"kind": "stateful", "where": "runner"}]}'
    ),
    (
        '{"data": {"form": "mapping", "inputs": "tokens", "ragged": true, "source": "iterable"}, "events": '
        '[{"at": 3, "kind": "stop"}], "model": {"parts": [{"kind": "dropout", "p": 0.5}], "tied": true}, '
        '"optimizer": {"by_config": false, "kind": "lookahead"}, "settings": {"accum_steps": 3, "batch_size": 2, '
        '"drop_last": false, "num_workers": 2, "schedule": {"interval": "epoch", "kind": "step"}, "seed": 3}}'
    ),
    (
        '{"criterion": {"kind": "own_function"}, "data": {"form": "nested", "inputs": "image", "source": '
        '"iterable", "train": 14, "val": 12}, "events": [{"at": 3, "kind": "checkpoint"}, {"kind": "kill"}], '
        '"model": {"parts": [{"kind": "tanh"}, {"kind": "group_norm"}]}, "optimizer": {"by_config": false, '
        '"fused": true, "kind": "adamw", "lr": 0.01}, "settings": {"accum_steps": 3, "batch_size": 2, '
        '"checkpoint_backend": "dcp", "epochs": null, "evaluate_interval": 3, "schedule": {"kind": "lambda"}, '
        '"seed": 2, "steps": 6}, "state": [{"kind": "tensor", "where": "runner"}, {"kind": "list", "where": '
        '"runner"}]}'
    ),
    (
        '{"criterion": {"kind": "in_model"}, "data": {"augment": ["torch", "numpy", "random", "generator", '
        '"numpy_generator"], "form": "keywords", "source": "dataset", "train": 9, "val": 1}, "model": {"parts": '
        '[{"kind": "counter"}]}, "optimizer": {"by_config": false, "kind": "nesterov", "lr": 0.01, '
        '"weight_decay": 0.1}, "settings": {"accum_steps": 2, "batch_size": 1, "ema": {"interval": 2, "warmup": '
        'true}, "epochs": null, "schedule": {"kind": "wsd"}, "seed": 2, "shuffle": false, "steps": 5}}'
    ),
    (
        '{"criterion": {"kind": "in_model"}, "data": {"form": "keywords", "source": "iterable", "train": 4, '
        '"val": 7}, "events": [{"at": 0, "kind": "evaluate"}, {"at": 4, "kind": "infer"}], "model": {"parts": '
        '[{"kind": "mask"}, {"kind": "memory"}, {"kind": "counter"}]}, "optimizer": {"by_config": false, "kind": '
        '"lookahead"}, "settings": {"accum_steps": 2, "async_mode": "disabled", "batch_size": 1, "ema": {"decay": '
        '0.9}, "epochs": null, "evaluate_interval": 2, "max_grad_norm": 0.1, "schedule": {"kind": "wsd"}, "seed": '
        '3, "steps": 2}, "stack": {"kind": "graph"}, "state": [{"kind": "tuple", "where": "runner"}, {"kind": '
        '"float", "where": "runner"}]}'
    ),
    (
        '{"criterion": {"kind": "own_module"}, "data": {"train": 13, "val": 1}, "model": {"parts": [{"kind": '
        '"group_norm"}, {"kind": "frozen"}, {"kind": "complex"}, {"kind": "group_norm"}]}, "optimizer": '
        '{"by_config": false, "groups": true, "lr": 0.03}, "settings": {"batch_size": 6, "drop_last": false, '
        '"epochs": null, "evaluate_interval": 2, "seed": 2, "steps": 2}, "stack": {"ranks": 2}}'
    ),
)
"""Programs of a search, chosen so that as many pairs of parts as possible run together."""
