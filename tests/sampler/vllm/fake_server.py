"""A local server with the routes of vLLM, which computes what it answers, or misbehaves as told."""

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np

from tests.model.families import family, random_params
from twinkle_jax.data import small_tokenizer
from twinkle_jax.model import Decoder, hidden_states, output_logits, parse_config, save_pretrained
from twinkle_jax.twinkle.model import TransformersModel

ROOM = 64


def write_checkpoint(
    directory,
    *,
    name="qwen3",
    tied=False,
    hidden=24,
    head_dim=8,
    characters="0123456789+=",
    **changes,
):
    """Write a small Qwen3 and its tokenizer."""
    tokenizer = small_tokenizer(characters)
    config = parse_config(
        family(
            name,
            vocab_size=len(tokenizer),
            max_position_embeddings=ROOM,
            tie_word_embeddings=tied,
            head_dim=head_dim,
            hidden_size=hidden,
            **changes,
        )
    )
    save_pretrained(Decoder(config, random_params(config)), directory)
    tokenizer.save_pretrained(directory)
    return directory


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # as many as the client opens at a time

    def handle_error(self, request, client_address):
        """Say nothing of clients that went away: that is what some tests are about."""


class FakeServer:
    """Serves a checkpoint until its context ends.

    Attributes:
        alter: for a path, a function that changes the JSON of an answer.
        take_over: for a path, a function of a handler that answers otherwise; True if it has.
        asked: path and JSON of each request, in order.
        logprobs_mode: which scores it gives, as vLLM's option of that name.
        shift: what is added to logits that it gives.
        loads: whether weights are loaded when it says so.
        experts: the model sends tokens through the experts that `odd_experts` names, and the
            server reports these.
    """

    def __init__(self, directory):
        self.name = str(directory)
        self.first = TransformersModel(model_id=directory)
        self.models = {self.name: self.first}
        self.alter, self.take_over, self.asked = {}, {}, []
        self.logprobs_mode, self.loads = "processed_logprobs", True
        self.max_model_len, self.shift, self.experts = ROOM, 0.0, False
        self._compiled = jax.jit(
            lambda params, config, tokens, routing: output_logits(
                params, config, hidden_states(params, config, tokens, routing=routing)
            ),
            static_argnums=1,
        )
        self._lock = threading.Lock()

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                fake.handle(self)

            do_POST = do_GET

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def stop(self):
        if self._thread.is_alive():
            self.http.shutdown()
            self._thread.join()
            self.http.server_close()

    def restart(self):
        """Have the checkpoint's weights again, and no adapter, as after a restart."""
        self.models = {self.name: self.first}

    def paths(self):
        return [path.partition("?")[0] for path, _ in self.asked]

    def handle(self, handler):
        size = int(handler.headers.get("Content-Length", 0))
        body = json.loads(handler.rfile.read(size)) if size else None
        handler.body, path = body, handler.path.partition("?")[0]
        self.asked.append((handler.path, body))
        if path in self.take_over and self.take_over[path](handler):
            return
        with self._lock:
            status, answer = self.answer(path, body)
        if path in self.alter:
            answer = self.alter[path](answer)
        send(handler, status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def answer(self, path, body):
        if path == "/v1/models":
            base = {"id": self.name, "root": self.name, "max_model_len": self.max_model_len}
            return 200, {"data": [base, *({"id": name} for name in self.models)]}
        if path == "/v1/completions":
            if body["model"] not in self.models:
                return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
            return 200, self.complete(body)
        if path == "/collective_rpc":
            place = body["kwargs"]["weights_path"]
            if self.loads:
                self.models[self.name] = TransformersModel(model_id=place)
            return 200, {"results": [None]}
        if path == "/v1/load_lora_adapter":
            model = TransformersModel(model_id=self.name)
            model.add_adapter_to_model("default", body["lora_path"])
            self.models[body["lora_name"]] = model
            return 200, b"Success"
        if path == "/v1/unload_lora_adapter":
            del self.models[body["lora_name"]]
            return 200, b"Success"
        known = ("/pause", "/resume", "/reset_prefix_cache")
        return (200, {"success": True}) if path in known else (404, {"detail": "Not Found"})

    def logits(self, model, tokens):
        padded = np.zeros((1, ROOM), np.int32)
        padded[0, : len(tokens)] = tokens
        routing = odd_experts(model.config, padded) if self.experts else None
        logits = self._compiled(model.params, model.config, padded, routing)
        return np.asarray(logits)[0, : len(tokens)]

    def complete(self, body):
        model = self.models[body["model"]]
        choices = [self.choice(model, body, index) for index in range(body["n"])]
        return {"model": body["model"], "choices": choices}

    def choice(self, model, body, index):
        rng = np.random.default_rng([(body["seed"] or 0) + index])
        tokens, of_tokens, tops, reason = [], [], [], "length"
        for _ in range(body["max_tokens"]):
            raw = self.logits(model, body["prompt"] + tokens)[-1].astype(np.float64)
            processed = self.process(raw, body, tokens)
            token = int(rng.choice(len(raw), p=np.exp(processed)))
            if not body["temperature"]:
                token = int(np.argmax(processed))
            scores = {
                "processed_logprobs": processed,
                "raw_logprobs": log_softmax(raw),
                "raw_logits": raw + self.shift,
            }[self.logprobs_mode]
            best = {int(t) for t in np.argsort(scores)[::-1][: body["logprobs"]]} | {token}
            tokens.append(token)
            of_tokens.append(max(float(scores[token]), -9999.0))
            tops.append({f"token_id:{t}": max(float(scores[t]), -9999.0) for t in best})
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
        return {
            "index": index,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": of_tokens, "top_logprobs": tops},
            "prompt_logprobs": self.prompt_logprobs(model, body),
            "routed_experts": self.routed(model.config, [*body["prompt"], *tokens[:-1]]),
        }

    def routed(self, config, tokens):
        """The experts of these tokens, as vLLM writes them."""
        return in_base64(odd_experts(config, [tokens])[0]) if self.experts else None

    def process(self, raw, body, tokens):
        """Log-probabilities of what is drawn from, in the order in which vLLM changes logits."""
        logits = raw.copy()
        logits[
            sorted(set(range(len(raw))) - set(body.get("allowed_token_ids", range(99))))
        ] = -np.inf
        seen = sorted({*body["prompt"], *tokens})
        penalty = body["repetition_penalty"]
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if not body["temperature"]:
            return log_softmax(logits)
        filters = (body["min_p"], body["top_k"] or len(raw), body["top_p"])
        return behind_filters(logits, body["temperature"], *filters)

    def prompt_logprobs(self, model, body):
        if body["prompt_logprobs"] is None:
            return None
        rows = [None]
        scores = self.logits(model, body["prompt"]).astype(np.float64)
        for token, row in zip(body["prompt"][1:], scores, strict=False):
            logprobs = log_softmax(row)
            best = {int(t) for t in np.argsort(logprobs)[::-1][: body["prompt_logprobs"]]} | {token}
            rows.append({str(t): {"logprob": float(logprobs[t]), "rank": 1} for t in best})
        return rows


def odd_experts(config, tokens):
    """Name experts by the token and its place, as no router does: [batch, time, layers, chosen].

    Those of dense layers are 0, as vLLM writes them.
    """
    tokens = np.asarray(tokens)
    rows = tokens + 3 * np.arange(tokens.shape[1])
    numbers = np.add.outer(np.arange(config.layers), np.arange(config.experts.chosen))
    named = ((rows[..., None, None] + numbers) % config.experts.number).astype(np.uint8)
    named[:, :, : config.dense_layers] = 0
    return named


def in_base64(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def behind_filters(logits, temperature, min_p, top_k, top_p):
    """Log-probabilities that are left, in the order in which vLLM filters."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0
    order = np.argsort(-weights)
    weights[order[top_k:]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p * weights.sum()]] = 0
    with np.errstate(divide="ignore"):
        return np.log(weights / weights.sum())


def log_softmax(logits):
    shifted = logits - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))


def send(handler, status, content, *, promised=None):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if promised is None else promised))
    handler.end_headers()
    handler.wfile.write(content)


def lose(handler):
    """Close the connection without an answer."""
    handler.close_connection = True
    return True


def adapters_in(directory):
    return sorted(path.name for path in Path(directory).glob("adapter-*"))
