"""A whole job on Ray Data: a folder or bucket of Parquet or JSON Lines in, Parquet out, each id exactly once.

    python examples/ray_data.py facebook/bart-large-cnn s3://b/in s3://b/out --format jsonl --workers 64 --gpus 1

No process reads all of INPUT: each worker gets blocks of rows. Ray notes in OUTPUT-ids the ids that are written, so
that the same command resumes after a crash, and generates nothing if all is done. RAY_ADDRESS names a cluster;
without it this machine is one. Ids must be unique. OUTPUT has INPUT's columns, "outputs" (a list of texts), "error".
"""

import argparse
import json

import pyarrow as pa
import ray
from ray.data.checkpoint import CheckpointConfig

import fastgen


class Generate:
    """Generates for the blocks of rows that one worker gets."""

    def __init__(self, model: str, column: str, settings: dict) -> None:
        self.generator, self.column = fastgen.TextGenerator(model, **settings), column

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Returns the rows with their outputs and errors, in columns that have a type even if nothing failed."""
        records = self.generator(rows[self.column].to_pylist())
        texts = [[output["text"] for output in record["outputs"]] for record in records]
        errors = [record.get("error") for record in records]
        rows = rows.append_column("outputs", pa.array(texts, pa.list_(pa.string())))
        return rows.append_column("error", pa.array(errors, pa.string()))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("model", "input", "output"):
    parser.add_argument(name)
parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="format of INPUT")
parser.add_argument("--column", default="text", help="column of the inputs (default: text)")
parser.add_argument("--id", default="id", help="column of the ids (default: id)")
parser.add_argument("--workers", type=int, default=1, help="models; on CPUs leave some for reading and writing")
parser.add_argument("--cpus", type=int, default=1, help="CPUs of each worker")
parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker")
parser.add_argument("--rows", type=int, default=512, help="rows that are sorted by length together: 16 batches or more")
parser.add_argument("--settings", type=json.loads, default={}, help='for TextGenerator: {"num_beams": 4, "bs": 32}')
args = parser.parse_args()

ids = CheckpointConfig(args.id, f"{args.output.rstrip('/')}-ids", delete_checkpoint_on_success=False)
ray.data.DataContext.get_current().checkpoint_config = ids
read = {"parquet": ray.data.read_parquet, "jsonl": ray.data.read_json}[args.format]
blocks = read(args.input).repartition(target_num_rows_per_block=args.rows)  # what a crash loses of each worker
blocks.map_batches(
    Generate,
    fn_constructor_args=(args.model, args.column, args.settings),
    compute=ray.data.ActorPoolStrategy(size=args.workers),
    batch_size=args.rows,
    batch_format="pyarrow",
    num_cpus=args.cpus,
    num_gpus=args.gpus,
).write_parquet(args.output)
