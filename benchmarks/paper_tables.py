"""What the four papers print, as they print it, and in which set-up: for show_papers.py.

Table 1, 2, 4: of FastSeq (Yan et al., 2021). MULTI_QUERY: Table 2 of "Fast Transformer Decoding" (Shazeer, 2019). The
other two papers have figures and text, which show_papers.py quotes.
"""

SET_UPS = (
    (
        "FastSeq (Yan et al., 2021)",
        "V100 PCIe 16 GB, 24 CPU cores; trained models, sources of up to 1,024 tokens; whole runs, model loading and "
        "files included; the tables name no dtype, the example has fp16",
        "CPU, fp32; the same shapes with random weights; sources of 256 tokens, 16 new tokens (translation: 32, 24); "
        "calls of `generate`",
    ),
    (
        "MultiGen",
        "A5000 24 GB; Llama 2 of 1.3 billion weights; 50 samples, 50 new tokens, prompt of 50 tokens, one of which "
        "varies; curves, no numbers, no dtype",
        "CPU, fp32; Llama-like, layers of width 768, random weights; 50 samples, 16 new tokens, prompt of 50 tokens",
    ),
    (
        "Fast Transformer Decoding (Shazeer, 2019)",
        "TPUv2, 8 cores; batch 1,024; no dtype",
        "CPU, fp32; the same sizes with random weights; batch 4",
    ),
    (
        "Seamless M4T, fast (Lee et al., 2024)",
        "A100; v2 large, batch 1, trained; no dtype",
        "CPU, fp32; v2 with fewer layers in each encoder and decoder, random weights, batch 1 "
        "([all layers](benchmarks.md), on another CPU)",
    ),
)
TABLE_1 = {  # as the paper prints it: shape, samples per second without and with FastSeq, how many times as fast
    "bart": ("BART", "12L-12L-1024", "2.4 → 18.4", "7.7×"),
    "distilbart": ("DistilBART", "12L-6L-1024", "3.4 → 18.5", "5.4×"),
    "prophetnet": ("ProphetNet", "12L-12L-1024", "2.8 → 10.7", "3.8×"),
    "t5": ("T5", "12L-12L-768", "8.7 → 31.3", "4.3× (by its figures 3.6×)"),
    "wmt": ("Transformer", "6L-6L-1024", "96.0 → 417.0", "4.3×"),
    "gpt2": ("GPT-2", "0L-12L-768", "3.0 → 16.7", "5.5×"),
    "unilm": ("UniLM", "12L-0L-768", "1.7 → 16.4", "9.6×"),
}
TABLE_2 = {  # as the paper prints it: its row, batch, GB of cache, samples per second
    "no cache": ("no cache", 32, 0.0, "1.8 (0.7×)"),
    "stock": ("BART-large", 32, 6.3, "2.4 (1.0×)"),
    "+ pipeline": ("+ asynchronous pipeline", 32, 6.3, "3.6 (1.5×)"),
    "+ n-gram op": ("+ GPU n-gram block", 32, 6.3, "5.6 (2.3×)"),
    "+ shared caches": ("+ attention cache optimize", 32, 1.8, "8.1 (3.3×)"),
    "+ captured steps": ("–",) * 4,
    "fastgen": ("+ larger batch", 128, 7.2, "18.4 (7.7×)"),
}
TABLE_4 = (
    ("BART-large, fp32", "44.21/21.20/41.03", "44.21/21.20/41.03"),
    ("BART-large, fp16", "44.22/21.20/41.04", "44.22/21.21/41.03"),
    ("ProphetNet-large, fp32", "44.20/21.17/41.30", "44.20/21.17/41.30"),
    ("ProphetNet-large, fp16", "44.17/21.17/41.28", "44.17/21.17/41.28"),
    ("UniLM-large, fp32", "43.08/20.43/40.34", "–"),
    ("UniLM-large, fp16", "43.06/20.42/40.32", "43.08/20.29/40.32"),
)
MULTI_QUERY = {  # microseconds: greedy encoder and decoder, beam-4 encoder and decoder
    "multi-head": (1.7, 46, 2.0, 203),
    "multi-query": (1.5, 3.8, 1.6, 32),
    "multi-head local": (1.7, 23, 1.9, 47),
    "multi-query local": (1.5, 3.3, 1.6, 16),
}
