"""Record 20 seconds of the live page as an animated PNG: `python docs/record_look.py docs/images/look.png`.

Trains a small model on two unequal CPU ranks, opens its page in Chromium (selenium, Debian's chromium-driver), slows
the data down in the middle, and takes a picture every half second. Needs Pillow.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver

WIDTH, HEIGHT = 1000, 940
EVERY_S, LENGTH_S = 0.5, 20.0
COLOURS = 96
TRAINING = """
import sys, time, torch, outrider

class Slowed(torch.utils.data.Dataset):
    \"\"\"After a while a sample takes long to read.\"\"\"
    def __init__(self):
        self.inputs = torch.randn(400_000, 64)
        self.labels = (self.inputs.sum(1) > 0).long()
        self.start = time.monotonic()
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        if time.monotonic() - self.start > 22:
            time.sleep(0.002)
        return self.inputs[index], self.labels[index]

def make_model():
    layers = [torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 512), torch.nn.Linear(512, 2)]
    return torch.nn.Sequential(*layers)

if __name__ == "__main__":
    outrider.train(
        make_model, lambda p: torch.optim.SGD(p, 0.05), lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        Slowed(), batch_size=64, epochs=1, policy="async", devices="cpu,cpu@0.5", run_dir=sys.argv[1], quiet=True,
    ).join()
"""


def main(target: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(TRAINING)
        training = subprocess.Popen([sys.executable, "train.py", "run"], cwd=folder, env=environment)
        while not (Path(folder) / "run" / "record.json").exists():
            time.sleep(0.2)
        page = subprocess.Popen(
            [sys.executable, "-m", "outrider", "watch", "run"], cwd=folder, stdout=subprocess.PIPE, text=True
        )
        assert page.stdout is not None
        try:
            frames = _pictures(page.stdout.readline().strip())
        finally:
            page.terminate()
            training.terminate()
            training.wait()
    # One palette for all pictures, from the last one, which has every colour: most of the page then stays the same.
    palette = frames[-1].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    first, *rest = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    first.save(target, save_all=True, append_images=rest, duration=round(EVERY_S * 1e3), loop=0, optimize=True)
    print(f"{target}: {len(frames)} pictures, {target.stat().st_size / 1e3:.0f} kB")


def _pictures(address: str) -> list[Image.Image]:
    options = webdriver.ChromeOptions()
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options)
    pictures: list[Image.Image] = []
    try:
        browser.get(address)
        started_s = time.monotonic()
        while (elapsed_s := time.monotonic() - started_s) < LENGTH_S:
            pictures.append(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB"))
            time.sleep(max(0.0, EVERY_S * len(pictures) - elapsed_s))
    finally:
        browser.quit()
    return pictures


if __name__ == "__main__":
    main(Path(sys.argv[1]))
