"""Take pictures of the live pages of a fit and of a search, in Chromium without a window.

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
from sparkdl import tune

HERE = Path(__file__).parent
COLORS = 64  # of a picture, so that its file is small
# The sizes of the window, with the scheme of colors.
OF_A_FIT = {
    "page.png": (1100, 980, "light"),
    "page-dark.png": (1100, 980, "dark"),
    "page-phone.png": (390, 1150, "light"),
}
OF_A_SEARCH = {"search.png": (1100, 860, "light")}


class Camera(keras.callbacks.Callback):
    """Opens the link that a fit or a search printed, once, and takes pictures.

    Args:
        printed: what the fit or the search prints.
        epochs: the number of epochs, of all fits together, after which the pictures are taken.
        sizes: the pictures.
        chart: the name of the chart that is awaited.
    """

    def __init__(self, printed, epochs, sizes, chart):
        super().__init__()
        self.printed, self.epochs = printed, epochs
        self.sizes, self.chart = sizes, chart

    def __copy__(self):
        """Return this camera, which all trials of a search share."""
        return self

    def __deepcopy__(self, memo):
        """Return this camera."""
        return self

    def on_epoch_end(self, epoch, logs=None):
        """Take the pictures, while the workers go on."""
        self.epochs -= 1
        if self.epochs == 0:
            link = re.search(r"Live page: (\S+)", self.printed.getvalue())[1]
            take(link, self.sizes, self.chart)


def take(link, sizes, chart):
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
        browser.find_element("css selector", f"#chart-{chart} svg")
        for name, (width, height, scheme) in sizes.items():
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
    """Train on noisy rows of six classes, and search for a model of them; take pictures on the way."""
    x, y = rows()
    printed = io.StringIO()
    options = {"batch_size": 128, "validation_split": 0.1, "verbose": 2}
    with contextlib.redirect_stdout(printed):
        camera = Camera(printed, 6, OF_A_FIT, "loss")
        sparkdl.SparkModel(
            build_model(), mode="asynchronous", frequency=4, num_workers=2
        ).fit(x, y, epochs=8, callbacks=[camera], **options)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        camera = Camera(printed, 26, OF_A_SEARCH, "curves")
        tune.search(
            built,
            (x, y),
            {"units": (8, 128), "rate": (1e-4, 1e-1, "log")},
            metric="val_accuracy",
            num_trials=12,
            epochs=6,
            seed=3,
            callbacks=[camera],
            **options,
        )


def built(units, rate):
    """Return a compiled model of the size and with the learning rate that a trial tries."""
    layers = [
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(6, activation="softmax"),
    ]
    model = keras.Sequential([keras.Input((32,)), *layers])
    optimizer = keras.optimizers.Adam(rate)
    model.compile(
        optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


if __name__ == "__main__":
    main()
