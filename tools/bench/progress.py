"""What the benchmarks share: a line on stderr for every measurement, and an end by Ctrl-C or SIGTERM that leaves what was
measured so far to be shown.

    progress = Progress(total)
    with progress:                        # a stop leaves this block, and nothing else
        figure = progress.measure("zero stage 2", lambda: ..., lambda figure: f"{figure:.2f} s")
    ... show what there is ...
    return progress.exit_code()
"""
import signal
import subprocess
import sys
import time


class Progress:
    def __init__(self, total):
        self.total, self.done, self.stopped = total, 0, False

    def __enter__(self):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        return self

    def __exit__(self, kind, error, trace):
        self.stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self.stopped:
            print(f"stopped after {self.done} of {self.total} measurements; what there is:", file=sys.stderr, flush=True)
        return self.stopped

    def measure(self, name, work, text=lambda figure: ""):
        began = time.monotonic()
        print(f"[{self.done + 1} of {self.total}] {name} ...", end="", file=sys.stderr, flush=True)
        try:
            figure = work()
        except BaseException:
            print(file=sys.stderr)
            raise
        self.done += 1
        print(f" {text(figure)} (took {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
        return figure

    def exit_code(self):
        return 1 if self.stopped else 0


def output_of(command):
    """What a command prints; its own messages are shown when it fails. A stop ends it first."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, messages = child.communicate()
        except KeyboardInterrupt:
            child.terminate()
            try:
                child.communicate(timeout=30)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.kill()
            raise
    if child.returncode != 0:
        print(f"\n{messages}", end="", file=sys.stderr)
        raise SystemExit(f"{command[0]} failed with exit code {child.returncode}.")
    return out
