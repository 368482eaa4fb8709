"""`python -m disagg_operator` runs the operator."""

import sys

from .config import ConfigError
from .main import main

try:
    main()
except ConfigError as error:
    sys.exit(f"disagg-operator: {error}")
