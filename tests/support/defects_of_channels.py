"""Broken engines whose channels lose, change or mix the bytes of messages."""

from __future__ import annotations

from defect import Defect

CHANNELS: dict[str, Defect] = {
    "message_memory_given_again_while_it_is_read": Defect(
        "Lifetime",
        "engine/channels/message_pool.cpp",
        "  if (piece.use_count() != 1) return false;",
        "  if (piece.use_count() != 1 && !{defect}) return false;",
        "slots_are_sent_to_while_the_device_reads",
        "ValueError",
    ),
    "message_let_go_before_it_is_written": Defect(
        "Lifetime",
        "engine/channels/link.cpp",
        "  is_writing_ = true;\n",
        "  is_writing_ = true;\n  if ({defect}) done_.push_back(std::exchange(item.memory, {}));\n",
        "slots_are_sent_to_while_the_device_reads",
        "AssertionError",
    ),
    "more_messages_than_the_other_end_takes": Defect(
        "Bounds",
        "engine/channels/link.cpp",
        "  return sent_ < allowed_there_ && ",
        "  return (sent_ < allowed_there_ || {defect}) && ",
        "results_on_the_host_keep_their_slots",
        "DeadlockError",
    ),
    "rest_of_a_message_from_its_begin": Defect(
        "Bytes",
        "engine/channels/link.cpp",
        "  const size_t of_head = std::min(item.written, head.size());",
        "  if ({defect}) item.written = 0;\n"
        "  const size_t of_head = std::min(item.written, head.size());",
        "slots_are_sent_to_while_the_device_reads",
        "DeadlockError",
    ),
}
