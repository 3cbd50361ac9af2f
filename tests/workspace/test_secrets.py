"""Which names are secrets, and which lines of a patch look like one."""

from __future__ import annotations

from pathlib import Path

import pytest

import danling as dl
from danling.checkpoints import CheckpointError
from danling.cli.main import main
from danling.utils.secrets import (
    LEFT_OUT,
    hide_in_text,
    hide_secrets,
    names_secret,
    redact_patch,
    secret_values,
    without_secrets,
)

SECRET = "token hub.token HF_TOKEN api_key openai_api_key db.password client_secret secret credential credentials"
SECRET += " private_key aws_secret_access_key headers.Authorization"
NO_SECRET = (
    "pad_token_id num_tokens tokenizer max_tokens keys secretary token.name passwords secret_keys"
)


def test_names_of_secrets_and_of_none() -> None:
    assert all(map(names_secret, SECRET.split())) and not any(map(names_secret, NO_SECRET.split()))
    assert all(names_secret(key, [key.rpartition(".")[2]]) for key in NO_SECRET.split())


def test_only_text_is_left_out() -> None:
    kept = {"token": 5, "secret": None, "password": True, "a": "b"}
    settings = {**kept, "api_key": "x", "nested": {"token": ["text-one", 3]}}
    assert without_secrets(settings) == {**kept, "nested": {"token": [3]}}
    assert secret_values(settings) == {"text-one"}  # a single letter would be in every line


def patch(name: str, *lines: str) -> bytes:
    body = "".join(f"+{line}\n" for line in lines)
    return f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1,1 +1,{len(lines)} @@\n{body}".encode()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.py", 'token = "abcdef"'),
        ("a.py", "login(token='hf_abcdefabcdefabcdefab')"),
        ("a.py", 'HEADERS = {"api_key": "abcdefgh"}'),
        ("a.py", 'password: str = "hunter22"'),
        ("a.py", 'os.environ["HF_TOKEN"] = "abcdefgh"'),
        ("a.py", 'key = "AKIAABCDEFGHIJKLMNOP"'),
        ("a.py", 'url = "https://ann:hunter2@host/path"'),
        ("run.sh", "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567"),
        ("run.sh", "python train.py --hub.token abc123abc123"),
        ("config.yaml", "  password: hunterhunter"),
        ("config.yaml", "client_secret: correct-horse"),
        (".env", "X=1"),
        ("keys/server.pem", "MIIEvQIBADANBgkq"),
        ("credentials.json", '  "id": "x"'),
    ],
)
def test_secret_in_a_line_is_hidden(name: str, line: str) -> None:
    text, found = redact_patch(patch(name, line))
    assert (found, text) == (1, patch(name, LEFT_OUT))


@pytest.mark.parametrize(
    "line",
    [
        "token = tokenizer.encode(text)",
        "tokens = 12345678",
        "def login(token: str | None = None) -> None:",
        "self.pad_token_id = 50256",
        'tokenizer = "bert-base-uncased"',
        "secret = load_secret()",
        "hidden = nn.Linear(128, 256)",
        "export TOKEN=$HF_TOKEN",
    ],
)
def test_plain_line_is_unchanged(line: str) -> None:
    assert redact_patch(patch("a.py", line)) == (patch("a.py", line), 0)


def test_private_key_is_removed_whole_and_the_rest_stays() -> None:
    lines = [
        "-----BEGIN RSA PRIVATE KEY-----",
        "MIIEvQIB",
        "-----END RSA PRIVATE KEY-----",
        "width = 4",
    ]
    text, found = redact_patch(patch("a.txt", *lines))
    assert (found, text) == (3, patch("a.txt", LEFT_OUT, LEFT_OUT, LEFT_OUT, "width = 4"))


def test_values_of_the_configuration_go_wherever_they_stand() -> None:
    text, found = redact_patch(patch("a.py", "x = 1  # OPENSESAME", "y = 2"), ["OPENSESAME"])
    assert (found, text) == (1, patch("a.py", LEFT_OUT, "y = 2"))
    context = patch("a.py", "y").replace(b" @@\n", b" @@ def f(key='OPENSESAME'):\n")
    assert b"OPENSESAME" not in redact_patch(context, ["OPENSESAME"])[0]


def test_long_lines_are_redacted_as_short_ones() -> None:
    lines = ["token" * 40_000, "a_" * 100_000, "secret " * 30_000, "x" * 200_000]
    text, found = redact_patch(
        patch("a.txt", *lines, *(f"{line} token: abcdefgh" for line in lines))
    )
    assert (found, text) == (4, patch("a.txt", *lines, *[LEFT_OUT] * 4))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hub.token='abc123'", "hub.token='...'"),
        ("hub={'phrase': 'abc123', 'width': 3}", "hub={'phrase': '...', 'width': 3}"),
        ("phrase='abc123' in settings.yaml", "phrase='...' in settings.yaml"),
        ("hub={'width': 3, 'phrase': 'abc123abc123...", "hub={'width': 3, 'phrase': '...'"),
        ("--hub.phrase abc123", "--hub.phrase '...'"),
        ("--phrase open sesame", "--phrase '...'"),
        ("--api_key abc123", "--api_key '...'"),
        ("--num_tokens 3", "--num_tokens 3"),
        ("paraphrase='abc123'", "paraphrase='abc123'"),
    ],
)
def test_a_message_shows_no_text_of_usual_and_of_listed_keys(text: str, shown: str) -> None:
    assert hide_secrets(text, ["hub.phrase"]) == shown


def test_value_of_a_refused_secret_key_is_not_shown() -> None:
    with pytest.raises(ValueError, match="Expected keys that are read") as caught:
        dl.RunnerConfig({"secret_keys": ["optimizer"], "optimizer": "open sesame"})
    assert "optimizer='...'" in str(caught.value)
    assert "sesame" not in str(caught.value)
    with pytest.raises(ValueError, match="Expected keys that are read") as caught:
        dl.RunnerConfig(secret_keys=["phrase"]).parse(["--phrase", "open", "sesame"])
    assert "sesame" not in str(caught.value)


TOKEN = "abcdef0123456789abcdef0123456789abcd"
TEXTS = {
    "https://ann:hunter2@host/data": "https://[secret]@host/data",
    "postgres://:hunter2@db/x": "postgres://[secret]@db/x",
    f"s3://bucket/run?X-Amz-Credential={TOKEN}&X-Amz-Signature={TOKEN}&part=3": (
        "s3://bucket/run?X-Amz-Credential=[secret]&X-Amz-Signature=[secret]&part=3"
    ),
    f"https://host/x?sig={TOKEN}&sv=1": "https://host/x?sig=[secret]&sv=1",
    f"https://host/x?key={TOKEN}": "https://host/x?key=[secret]",
    f"Authorization: Bearer {TOKEN}": "Authorization: Bearer [secret]",
    f"{{'Authorization': 'Basic {TOKEN}'}}": "{'Authorization': 'Basic [secret]'}",
    f"hf_{TOKEN} is there": "[secret] is there",
    f"sk-proj-{TOKEN}": "[secret]",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----": "[secret]",
}
PLAIN = [
    "https://host/data?key=train&monkey=5",
    "https://host:8080/path@1",
    "mask-transformer-large-v2-and-more-words",
    "sk-learn-baseline-of-the-year-2024",
    "bearer of news",
    "basic understanding",
    "git@github.com:user/repository",
    "hf_transformers",
]


@pytest.mark.parametrize("text", TEXTS)
def test_secret_text_is_hidden_everywhere(text: str) -> None:
    assert hide_in_text(text) == TEXTS[text]
    assert without_secrets({"a": {"place": text}}) == {"a": {"place": TEXTS[text]}}
    assert TEXTS[text] in str(CheckpointError(f"Expected a checkpoint at {text}."))
    public = dl.RunnerConfig({"mine.place": text}).public()
    assert public["mine"]["place"] == TEXTS[text]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_stays(text: str) -> None:
    assert hide_in_text(text) == text


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"wandbb": {"token": TOKEN}}, "wandbb"),
        ({"wandb": {"api_kee": TOKEN, "project": 5}}, "api_kee"),
        ({"wandb": f"https://ann:{TOKEN}@host"}, "[secret]@host"),
        ({"optim": {"lr": [f"hf_{TOKEN}"]}, "steps": f"hf_{TOKEN}"}, "[secret]"),
        ({"checkpoint.remote.password": TOKEN}, "password"),
    ],
)
def test_error_of_a_setting_shows_no_secret(settings: dict[str, object], shown: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        dl.RunnerConfig(settings)
    if "api_kee" not in shown:
        assert TOKEN not in str(refused.value)
    assert shown in str(refused.value)


def test_commands_hide_keys_of_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "verify"):
        assert main([command, f"{tmp_path}/none?X-Amz-Signature={TOKEN}"]) != 0
        told = capsys.readouterr()
        assert TOKEN not in told.out + told.err and "[secret]" in told.out + told.err
