"""Run by test_sharded_loading.py on several ranks: loads models under ZeRO-3 and writes down what each rank saw.

accelerate launch --config_file FILE tests/loading.py WHOLE DAMAGED OUT
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from finetune.quiet import silence

silence()
import deepspeed  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from finetune import distributed, model  # noqa: E402
from finetune.launch import find_launch, parent_command_lines  # noqa: E402
from finetune.mistakes import Mistakes  # noqa: E402
from finetune.recipe import Method, Model, Recipe  # noqa: E402


def status(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peak_of(action) -> int:
    """By how many bytes the resident set grew at most while `action` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def main(whole: Path, damaged: Path, out: Path) -> None:
    launch = find_launch(os.environ, parent_command_lines(), has_gpus=False)
    accelerator = distributed.start(Recipe.model_validate({"run": {"trackers": []}}), launch, "fp32")
    config, loaded, seen = distributed.deepspeed_config(accelerator), {}, {"rank": accelerator.process_index}

    def load(folder: Path):
        return model.load_model(Model(name=str(folder)), Method(), folder, "fp32", accelerator.device, config)

    try:
        load(damaged)  # first, so that what libraries allocate once is not counted below
    except Mistakes as error:
        seen["mistakes"] = str(error)
    seen["peak_bytes"] = peak_of(lambda: loaded.update(ours=load(whole)))
    parameters = dict(loaded["ours"].named_parameters())
    seen["local_share"] = sum(p.ds_tensor.numel() for p in parameters.values()) / sum(p.ds_numel for p in parameters.values())
    seen["dtypes"] = sorted({str(p.ds_tensor.dtype) for p in parameters.values()})
    expected = {}
    for file in whole.glob("*.safetensors"):
        expected |= load_file(file)
    wrong = []
    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters([parameter]):
            if not torch.equal(parameter.detach(), expected.pop(name)):
                wrong.append(name)
    seen["wrong"], seen["not_loaded"] = wrong, sorted(expected)
    accelerator.wait_for_everyone()
    loaded.clear()
    # transformers' own loader, to see that the measurement sees a whole model.
    seen["peak_bytes_of_transformers"] = peak_of(lambda: loaded.update(theirs=AutoModelForCausalLM.from_pretrained(whole)))
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
