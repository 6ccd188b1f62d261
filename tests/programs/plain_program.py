"""Says what the interpreter looks like to a script, and ends as it is told: plain_program.py [--end HOW] [ARGUMENTS...]."""

import json
import os
import sys

main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "argv": sys.argv,
            "path": sys.path,
            "main": {name: str(getattr(main, name, None)) for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__")},
            "spec": str(getattr(main, "__spec__", None)),
            "flags": str(sys.flags),
            "executable": sys.executable,
            "cwd": os.getcwd(),
            "input": sys.stdin.read() if "--read" in sys.argv else None,
            "environment": sorted(name for name in os.environ if not name.startswith("MSPROBE_")),
        }
    )
)
print("a line for stderr", file=sys.stderr)
how = sys.argv[sys.argv.index("--end") + 1] if "--end" in sys.argv else "0"
if how == "exception":
    raise RuntimeError("the script's own")
if how == "text":
    sys.exit("an end in words")
if how == "killed":
    os.kill(os.getpid(), 9)
sys.exit(int(how))
