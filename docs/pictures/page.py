"""Take page.png, page-dark.png and page-phone.png of the live page of a fit, in Chromium without a window.

`make pictures` leaves them out, because each run takes other times. Needs Chromium, its driver and selenium.
"""

import contextlib
import io
import os
import re
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from PIL import Image
from plot import build_model, rows
from selenium import webdriver

import sparkdl

HERE = Path(__file__).parent
EPOCH = 6  # of eight, after which the pictures are taken
COLORS = 64  # of a picture, so that its file is small
SIZES = {  # of the window, with the scheme of colors
    "page.png": (1100, 980, "light"),
    "page-dark.png": (1100, 980, "dark"),
    "page-phone.png": (390, 1150, "light"),
}


class Camera(keras.callbacks.Callback):
    """Opens the link that a fit printed, once, and takes the pictures.

    Args:
        printed: what the fit prints.
    """

    def __init__(self, printed):
        super().__init__()
        self.printed = printed

    def on_epoch_end(self, epoch, logs=None):
        """Take the pictures, while the workers go on."""
        if epoch + 1 == EPOCH:
            take(re.search(r"Live page: (\S+)", self.printed.getvalue())[1])


def take(link):
    """Open a page in a browser, and write its pictures."""
    options = webdriver.ChromeOptions()
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-background-networking",
        "hide-scrollbars",
    ):
        options.add_argument(f"--{flag}")
    with webdriver.Chrome(options) as browser:
        browser.get(link)
        browser.implicitly_wait(30)
        browser.find_element("css selector", "#chart-loss svg")
        for name, (width, height, scheme) in SIZES.items():
            size = {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 500,
            }
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [feature]}
            )
            # The charts have their new size and colors in the frame after the next one.
            browser.execute_async_script("setTimeout(arguments[0], 2000)")
            picture = Image.open(
                io.BytesIO(browser.get_screenshot_as_png())
            ).convert("RGB")
            picture.quantize(COLORS, dither=Image.Dither.NONE).save(
                HERE / name, optimize=True
            )


def main():
    """Train on noisy rows of six classes, and take the pictures on the way."""
    x, y = rows()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        sparkdl.SparkModel(
            build_model(), mode="asynchronous", frequency=4, num_workers=2
        ).fit(
            x,
            y,
            epochs=8,
            batch_size=128,
            validation_split=0.1,
            verbose=2,
            callbacks=[Camera(printed)],
        )


if __name__ == "__main__":
    main()
