"""train.py itself, with a witness: what each rank's engine and shards are once Accelerate has prepared them goes to a file.

accelerate launch --config_file FILE tests/probe.py WITNESS_FOLDER [what follows train.py]
"""

import json
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
import train


def main() -> None:
    folder, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    train.silence()
    from finetune import distributed

    check_prepared = distributed.check_prepared

    def witness(accelerator, network, *rest):
        check_prepared(accelerator, network, *rest)
        import torch

        parameters = list(network.module.parameters())
        sharded = [p for p in parameters if p.ds_tensor.numel() < p.ds_numel]
        seen = {
            "engine": f"{type(network).__module__}.{type(network).__name__}",
            "optimizer": type(network.optimizer).__name__,
            "stage": network.zero_optimization_stage(),
            "world_size": torch.distributed.get_world_size(network.data_parallel_group),
            "backend": torch.distributed.get_backend(),
            "clipping": network.gradient_clipping(),
            "train_batch_size": network.train_batch_size(),
            "sharded_numel": sum(p.ds_numel for p in sharded),
            "numel": sum(p.ds_numel for p in parameters),
            "held_numel": sum(p.ds_tensor.numel() for p in parameters),
        }
        (folder / f"{accelerator.process_index}.json").write_text(json.dumps(seen))

    with mock.patch.object(distributed, "check_prepared", witness):
        train.main()


if __name__ == "__main__":
    main()
