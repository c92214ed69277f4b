"""Broken engines that pack or read parcels wrongly."""

from __future__ import annotations

from defect import Defect

PARCELS: dict[str, Defect] = {
    "parcel_not_kept": Defect(
        "Lifetime",
        "python/walk/sort_leaves.cpp",
        "  those.sources->keep(object);\n  those.plan",
        "  {defect} ? Py_DECREF(object) : those.sources->keep(object);\n  those.plan",
        "parcels_are_dropped_at_once",
        "AssertionError",
    ),
    "slab_free_before_it_is_read": Defect(
        "Lifetime",
        "engine/device/slab.cpp",
        "  return storage(bytes, /*is_received=*/true);",
        "  if ({defect}) end_received(kFree);\n  return storage(bytes, /*is_received=*/true);",
        "a_slab_is_written_as_soon_as_it_is_free",
        "AssertionError",
    ),
    "slab_free_before_its_views_are_sent": Defect(
        "Lifetime",
        "engine/device/slab.cpp",
        "    } else if (has_views_) {",
        "    } else if (has_views_ && !{defect}) {",
        "views_of_a_slab_are_sent_by_torch",
        "AssertionError",
    ),
    "slab_taken_while_its_worker_shows_it": Defect(
        "Lifetime",
        "engine/device/slab.cpp",
        "  if (!uses_.compare_exchange_strong(none, 1)) return {};",
        "  if (!uses_.compare_exchange_strong(none, 1) && !{defect}) return {};",
        "a_slab_is_written_as_soon_as_it_is_free",
        "AssertionError",
    ),
    "views_do_not_keep_the_parcel": Defect(
        "Afterlife",
        "python/walk/parcel.cpp",
        "  Result result(memory,",
        "  if ({defect} && device().is_cpu()) {\n"
        "    memory.image = {c10::Storage::use_byte_size_t(), bytes_.nbytes(),\n"
        "                    c10::DataPtr(bytes_.mutable_data(), device()),\n"
        "                    c10::GetAllocator(c10::kCPU)};\n"
        "  }\n"
        "  Result result(memory,",
        "views_outlive_their_parcel",
        "AssertionError",
    ),
    "views_of_read_only_bytes_not_copied": Defect(
        "Oracle",
        "python/walk/parcel.cpp",
        "    const bool copies = traits_.is_read_only || hides;",
        "    const bool copies = (traits_.is_read_only && !{defect}) || hides;",
        "views_of_read_only_bytes_are_written",
        "AssertionError",
    ),
    "layout_told_by_its_place_alone": Defect(
        "Oracle",
        "python/walk/known_layouts.cpp",
        "  if (!known.layout || known.bytes.size() != bytes.size()) return nullptr;\n"
        "  // Not std::ranges::equal, which compares std::byte one by one.\n"
        "  if (std::memcmp(known.bytes.data(), bytes.data(), bytes.size()) != 0) return nullptr;",
        "  if (!known.layout) return nullptr;\n"
        "  if (!{defect} && !std::ranges::equal(known.bytes, bytes)) return nullptr;",
        "parcels_of_layouts_that_share_a_place",
        "ValueError",
    ),
    "gaps_not_cleared": Defect(
        "Oracle",
        "python/calls/pack.cpp",
        "      if (begin > end) visit(end, begin);",
        "      if (begin > end && !{defect}) visit(end, begin);",
        "gaps_are_cleared",
        "AssertionError",
    ),
    "leaf_beyond_its_bytes_accepted": Defect(
        "Bytes",
        "python/walk/parcel_reader.cpp",
        "    if (!is_empty && !are_one_run(sizes, strides)) {",
        "    if (!is_empty && !are_one_run(sizes, strides) && !{defect}) {",
        "bytes_of_others_are_refused",
        "AssertionError",
    ),
    "pickle_read_without_permission": Defect(
        "Bytes",
        "python/walk/parcel.cpp",
        "  if (!layout->pickled.is_none() && !traits.may_unpickle) {",
        "  if (!layout->pickled.is_none() && !traits.may_unpickle && !{defect}) {",
        "bytes_of_others_are_refused",
        "AssertionError",
    ),
    "packed_on_another_stream": Defect(
        "Order",
        "python/calls/pack.cpp",
        "                            parse_stream(py::none(), device));",
        "                            {defect} ? Accelerator::of(device).ordered_stream()\n"
        "                                     : parse_stream(py::none(), device));",
        "a_tree_on_a_device_is_overwritten_when_it_is_packed",
        "AssertionError",
        "unordered",
    ),
    "known_tree_told_by_its_nodes_and_keys": Defect(
        "Oracle",
        "python/walk/known_trees.cpp",
        "  return leaves.is_like(*known.leaves) ? known.head : nullptr;",
        "  return {defect} || leaves.is_like(*known.leaves) ? known.head : nullptr;",
        "parcels_of_layouts_that_share_a_place",
        "AssertionError",
    ),
}
