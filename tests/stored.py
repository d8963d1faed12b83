"""Stored folders that a test changes, with checksums that fit again, as someone hostile would."""

import json

from rarebit.storage.files import OWN_CHECKSUM, file_checksum, own_checksum


def tensors_file(folder):
    """The file of tensors in a folder that has one."""
    [path] = folder.glob("*.safetensors")
    return path


def sign(folder, name="model.json", **changes):
    """Change a description, and make its checksums fit what the folder holds now."""
    path = folder / name
    description = json.loads(path.read_text("utf-8"))
    if isinstance(description.get("files"), dict):
        for file in description["files"]:
            if (folder / file).is_file():
                description["files"][file] = file_checksum(folder / file)
    description |= changes
    description[OWN_CHECKSUM] = own_checksum(description)
    path.write_text(json.dumps(description), "utf-8")
