"""Installation of fastgen: pure Python, no compiler needed."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "transformers": ["transformers>=5.0", "tqdm"],
    # 0.12.2 has no working build for Python 3.11 and newer; ve-fairseq is the same code for those.
    "fairseq": ['fairseq==0.12.2; python_version < "3.11"', 've-fairseq==0.12.3; python_version >= "3.11"'],
    "ray": ["ray[data]"],
    "metrics": ["rouge-score", "sacrebleu"],
    "bench": ["matplotlib", "psutil"],
    "test": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "peft", "accelerate", "num2words"],
}
EXTRAS["test"].append('triton; platform_system == "Linux"')  # runs in its interpreter where there is no GPU
EXTRAS["test"] += EXTRAS["transformers"] + EXTRAS["metrics"]

setup(
    name="fastgen",
    version="0.1.0",
    description="Makes text generation with Hugging Face transformers and fairseq faster, with identical output",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["fastgen", "fastgen.*"]),
    package_data={"fastgen": ["py.typed"], "fastgen.models.demo": ["data/*"]},
    install_requires=["torch>=2.4", "wrapt>=1.16"],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "fastgen-generate-for-transformers = fastgen.cli.generate_for_transformers:main",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
