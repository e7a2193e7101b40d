"""Token files, tokenizers, batches and the demo corpus. Nothing here knows of models."""

from tileflash.data.corpus import demo_corpus
from tileflash.data.dataset import Dataset, read_dataset
from tileflash.data.loader import BatchLoader
from tileflash.data.prepare import prepare, prepare_demo
from tileflash.data.token_file import TokenFile, open_token_file, write_token_file
from tileflash.data.token_files import TokenFiles
from tileflash.data.tokenizers import TOKENIZERS, Tokenizer, get_tokenizer

__all__ = [
    "TOKENIZERS",
    "BatchLoader",
    "Dataset",
    "TokenFile",
    "TokenFiles",
    "Tokenizer",
    "demo_corpus",
    "get_tokenizer",
    "open_token_file",
    "prepare",
    "prepare_demo",
    "read_dataset",
    "write_token_file",
]
