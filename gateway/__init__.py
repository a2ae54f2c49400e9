"""How does HTTP become a request?"""

from gateway.app import create_app
from gateway.chat_template import ChatTemplate
from gateway.config import GatewayConfig
from gateway.detokenizer import IncrementalDetokenizer
from gateway.live_requests import LiveRequests
from gateway.served_model import ServedModel
from gateway.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "GatewayConfig",
    "IncrementalDetokenizer",
    "LiveRequests",
    "ServedModel",
    "Tokenizer",
    "create_app",
]
