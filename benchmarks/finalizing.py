"""What `ident3d finalize` takes a shard: python benchmarks/finalizing.py [--shards 40] [--resolution 224].

Shards of 1,000 samples are made of one rendered picture, with their summaries, as parts leave them, and then finalized
twice in fresh processes: with every shard read again, and with --quick. Printed: seconds and peak memory of both, per
shard, and what 100,000 shards would take (extrapolated).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fabricated import begin, fill

from ident3d import render_latents
from ident3d.codecs import encode_png

FINALIZE = """
import json, resource, sys, time
from pathlib import Path
from ident3d import finalize
began = time.perf_counter()
finalize(Path(sys.argv[1]), quick=sys.argv[2] == "quick")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(json.dumps({"seconds": time.perf_counter() - began, "peak_mb": peak}))
"""
MANY = 100_000


def main() -> None:
    """Make the shards, finalize them, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--folder", type=Path, help="where the shards are made; by default a temporary folder")
    parser.add_argument("--out", type=Path, help="a .json to write")
    args = parser.parse_args()
    picture = encode_png(render_latents([0.5] * 10, resolution=args.resolution)[0])
    found = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name, "d")
        folder, plan, latents = begin(root, 1000 * args.shards, 1000, args.resolution)
        for _ in fill(folder, plan, latents, [picture], keep=True):
            pass
        kept = shutil.copytree(root / ".render", Path(name, "kept"))
        for how in ("whole", "quick"):
            shutil.copytree(kept, root / ".render", dirs_exist_ok=True)
            (root / "dataset.json").unlink(missing_ok=True)
            command = [sys.executable, "-c", FINALIZE, str(root), how]
            done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            each = done["seconds"] / args.shards
            found[how] = {**done, "seconds_a_shard": each, "extrapolated_hours": MANY * each / 3600}
            print(
                f"{how}: {each:.3f} s a shard of {1000 * len(picture) / 1e6:.0f} MB, peak {done['peak_mb']:.0f} MB; "
                f"{MANY:,} shards: {MANY * each / 3600:.1f} hours (extrapolated)"
            )
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
