"""Fine-tune a model of transformers: which topic of Python's documentation is a paragraph from?

Without a name the model is a small BERT made here, with its tokenizer: nothing is
downloaded. NAME is a pretrained one, in a folder or on the Hub. Needs transformers and datasets.

python fine_tuning.py NAME              # one worker
unisono run -n 2 fine_tuning.py NAME    # two workers, the same digest
"""

import sys
from pydoc_data.topics import topics

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

import unisono

TOPICS = ("compound", "debugger", "formatstrings", "string-methods", "typesseq")
BATCH_SIZE, EPOCHS = 32, 6
Classifier = transformers.AutoModelForSequenceClassification


def make_tokenizer(texts):
    """Make one that knows the words of these texts."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )


def loss(model, batch):
    output = model(**batch)  # transformers computes the mean loss, as there are labels
    hits = (output.logits.argmax(1) == batch["labels"]).float().mean()
    return {"loss": output.loss, "accuracy": hits}


def main():
    parts = [(text, i) for i, topic in enumerate(TOPICS) for text in topics[topic].split("\n\n")]
    texts, labels = zip(*parts, strict=True)
    torch.manual_seed(0)
    if sys.argv[1:]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
        model = Classifier.from_pretrained(sys.argv[1], num_labels=len(TOPICS))
        model.train()  # `from_pretrained` leaves it in `eval()` mode
    else:
        tokenizer = make_tokenizer(texts)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), num_labels=len(TOPICS), intermediate_size=128, **sizes
        )
        model = Classifier.from_config(config)
    data = datasets.Dataset.from_dict(
        {**tokenizer(texts, truncation=True, max_length=64), "labels": labels}
    ).train_test_split(0.2, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5 if sys.argv[1:] else 2e-3)
    num_steps = EPOCHS * -(-len(data["train"]) // BATCH_SIZE)
    rates = transformers.get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    schedule = unisono.Schedule(rates, every="step")
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, clip_norm=1.0, schedule=schedule)
    pad = transformers.DataCollatorWithPadding(tokenizer)  # within each shard
    loader = DataLoader(data["train"], BATCH_SIZE, shuffle=True, collate_fn=pad)
    trainer.fit(loader, epochs=EPOCHS, validate=data["test"])
    if unisono.world().rank == 0:
        model.save_pretrained("fine-tuned")
        tokenizer.save_pretrained("fine-tuned")


if __name__ == "__main__":
    main()
