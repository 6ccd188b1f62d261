"""A process that has done the slow imports, and forks for every program that a test wants to run.

Reads one JSON request per line on stdin: `argv` (a script and its arguments), `cwd`, `environment` (variables to set), `stdout` and
`stderr` (files), `trace` (start msprobe as the `.pth` does at interpreter start). Answers with the exit status as the shell's wait would
give it. A forked program is a process of its own: its crash, signals and files are real. Only the imports are shared.
"""

import json
import os
import runpy
import sys
import warnings

import diffusers  # noqa: F401
import modelscope.trainers.trainer  # noqa: F401
import torch
import transformers  # noqa: F401
from diffusers import AutoencoderKL, DDPMScheduler, DiffusionPipeline, UNet2DConditionModel  # noqa: F401
from modelscope.trainers.multi_modal.dreambooth_diffusion import dreambooth_diffusion_trainer  # noqa: F401
from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401


def become(request):
    """In the child: set everything up as a fresh interpreter would, and run the script as `__main__`."""
    os.setsid()
    for descriptor, path in ((1, request["stdout"]), (2, request["stderr"])):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, descriptor)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(request["argv"][0]))
    warnings.resetwarnings()
    torch.set_num_threads(1)
    if request["trace"]:
        os.environ["MSPROBE_TRACE"] = "1"
        os.environ["MSPROBE_LAUNCHER_PID"] = str(os.getpid())
        import _modelscope_probe_boot  # noqa: F401
    runpy.run_path(request["argv"][0], run_name="__main__")


def run(request):
    """Fork, run, and wait."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        if request.get("announce"):
            print(json.dumps({"pid": pid}), flush=True)
        return os.waitpid(pid, 0)[1]
    status = 1
    try:
        become(request)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        import atexit

        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


def main():
    """Serve requests until stdin closes."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"status": run(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
