#!/usr/bin/env bash
# An answer and a structured answer with the `llm` command line: llm_cli.sh URL MODEL
set -euo pipefail
url=$1 model=$2
LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
trap 'rm -rf "$LLM_USER_PATH"' EXIT
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: served
  model_name: $model
  api_base: $url/v1
  api_key_name: none
  supports_schema: true
YAML
llm keys set none --value -
llm -m served -o temperature 0 'What is the capital of France?' | grep Paris
llm -m served -o temperature 0 -o max_tokens 150 --schema 'name, big bool' 'Describe Paris.' | python3 -c '
import json, sys
found = json.load(sys.stdin)
assert isinstance(found["big"], bool), found
print("llm:", found)'
