// Tasks whose middles begin with the same blocks: what they share is read once.
#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/engine.h"

namespace fluxion {

namespace {

// Together, members cost one another time where they want different tiles (kernels/attend.h, attend_lanes.h):
// more than to take a tile from a cache, and more than from memory if few want it. So all attend together if
// a tile has so many readers on average: of the members, where the last cache would keep the tiles from one
// to the next, and in all, where not, or where a matrix unit multiplies all heads with a tile at once, with
// weights that are rounded far less than by other ways for many heads.
constexpr double kAgreed = 0.9, kReaders = 3;
// With so many, most of what a member reads has been read by one before it.
constexpr double kNearReaders = 2;

// How many blocks of a middle lie before the page where what is shared ends.
int shared_blocks(const Blocks& at, int end_page) { return (end_page >> at.level) - at.first; }

}  // namespace

void Engine::find_families(int batch) {
  families_.clear();
  if (!config_.share_prefixes) return;
  for (int b = 0; b < batch; ++b) middle_ends_[b] = requests_[b].good ? requests_[b].window_page : 0;
  const int together = kMaxHeads / group_;
  families_.find(table_.data(), max_pages_, sink_pages(), {middle_ends_.data(), static_cast<size_t>(batch)},
                 together);
  size_t members = 0, pages = 0;
  for (const Family& family : families_.all()) {
    members = std::max<size_t>(members, std::min(family.count, together));
    for (const int32_t b : families_.members(family)) pages = std::max<size_t>(pages, middle_ends_[b]);
  }
  const size_t heads = members * group_;
  for (Scratch& s : scratch_) {
    Together& t = s.together;
    const auto grow = [](auto* v, size_t size) { v->resize(std::max(v->size(), size)); };
    t.members.reserve(members);
    grow(&t.queries, heads * shape_.token_bytes());
    grow(&t.scores, heads * pages);
    grow(&t.chosen, members * pages);
    grow(&t.pages, pages);
    grow(&t.masks, heads * pages);
    grow(&t.o, heads * shape_.head_dim);
    grow(&t.lse, heads);
    grow(&s.part_o, (kMaxChunks - 1) * heads * shape_.head_dim);
    grow(&s.part_lse, (kMaxChunks - 1) * heads);
  }
}

// Whether b * Hk + h is a task with this blk that can be in a bundle.
bool Engine::joins(int i, int blk) const {
  return !skip_[i / shape_.kv_heads] && blk_[i] == blk && !progressive(i) &&
         parts_[i].load(std::memory_order_relaxed) == 2 && args_.owner != nullptr &&
         args_.owner[i] == static_cast<int32_t>(Executor::kCpu);
}

void Engine::make_bundles() {
  bundles_.clear();
  bundled_.clear();
  if (batch_ == 0 || families_.all().empty()) return;
  const int heads = shape_.kv_heads, together = kMaxHeads / group_;
  std::fill_n(bundle_of_.data(), batch_ * heads, -1);
  for (const Family& family : families_.all()) {
    for (int level = 0; level < kLevels; ++level) {
      const int end_page = family.end_page >> level << level;
      if (end_page - sink_pages() < kLeastSharedPages) continue;
      for (int h = 0; h < heads; ++h) {
        const int first = static_cast<int>(bundled_.size());
        for (const int32_t b : families_.members(family)) {
          if (joins(b * heads + h, kPage << level)) bundled_.push_back(b * heads + h);
        }
        const int tasks = static_cast<int>(bundled_.size()) - first;
        const int bundles = (tasks + together - 1) / together;
        for (int n = 0; n < bundles; ++n) {
          const int begin = first + tasks * n / bundles, end = first + tasks * (n + 1) / bundles;
          if (end - begin < 2) continue;
          float value = 0;
          for (int i = begin; i < end; ++i) {
            value += args_.value[bundled_[i]];
            bundle_of_[bundled_[i]] = static_cast<int32_t>(bundles_.size());
          }
          bundles_.push_back({begin, end - begin, end_page, value});
        }
      }
    }
  }
}

void Engine::run_bundle(const Bundle& bundle, Scratch* s) {
  Together& t = s->together;
  gather_members(bundle, s);
  const int64_t shared_entries = select_together(bundle, s);
  int64_t saved_tiles = 0;
  const SharedTiles tiles = shared_tiles(bundle, s);
  const bool together = attends_together(bundle, tiles);
  const bool near =
      tiles.once > 0 && tiles.once <= config_.cached_bytes && tiles.apart >= kNearReaders * tiles.once;
  if (together) {
    const Selection shared = list_shared(bundle, s);
    saved_tiles = -shared.reads.tile_bytes;
    for (const Member& member : t.members) saved_tiles += member.chose.reads.tile_bytes;
    attend(t.queries.data(), bundle.count * group_, t.members[0].task.head, shared, t.pages.data(),
           t.masks.data(), s, t.o.data(), t.lse.data());
  }
  for (int m = 0; m < bundle.count; ++m) finish_member(bundle, m, together, !together && near && m > 0, s);
  // finish_task() has counted every task as if it were alone.
  s->stats[kStatTileBytes] -= saved_tiles;
  s->stats[kStatMetadataBytes] -= shared_entries;
  s->stats[kStatSharedTileBytes] += saved_tiles;
  s->stats[kStatSharedMetadataBytes] += shared_entries;
  s->stats[kStatSharedTasks] += bundle.count;
}

// The members and their queries, those first that choose by scores: a scan is for the leading heads.
void Engine::gather_members(const Bundle& bundle, Scratch* s) const {
  Together& t = s->together;
  t.members.clear();
  t.stride = 0;
  for (const bool ranked : {true, false}) {
    for (int i = bundle.begin; i < bundle.begin + bundle.count; ++i) {
      const Task task{bundled_[i] / shape_.kv_heads, bundled_[i] % shape_.kv_heads};
      const Blocks at = blocks_of(task);
      const Wanted wanted = wanted_of(task, at);
      if ((wanted.ranked != 0) != ranked) continue;
      std::memcpy(&t.queries[t.members.size() * group_ * shape_.token_bytes()],
                  query(task.request, task.head), group_ * shape_.token_bytes());
      t.stride = std::max<int64_t>(t.stride, at.count);
      t.members.push_back({task, at, wanted, {}});
    }
  }
}

// What every member chooses of its whole middle. Returns the bytes of metadata that sharing saved.
int64_t Engine::select_together(const Bundle& bundle, Scratch* s) const {
  Together& t = s->together;
  // Blocks [begin, end) of member m for its heads and those of the members after it.
  const auto scan = [&](int m, int begin, int end, int heads) -> int64_t {
    if (begin == end || heads == 0) return 0;
    const Member& member = t.members[m];
    const int64_t first = m * group_;
    return score_blocks(member.task, member.at.part(begin, end), &t.queries[first * shape_.token_bytes()],
                        heads, pool_->spread(), &t.scores[first * t.stride + begin], t.stride, s);
  };
  int ranked = 0;
  while (ranked < bundle.count && t.members[ranked].wanted.ranked != 0) ++ranked;
  const int shared = shared_blocks(t.members[0].at, bundle.end_page);
  const int64_t bytes = scan(0, 0, shared, ranked * group_);
  for (int m = 0; m < bundle.count; ++m) {
    Member& member = t.members[m];
    member.chose.ranked = member.wanted.ranked;
    if (m < ranked) member.chose.reads.metadata_bytes = bytes + scan(m, shared, member.at.count, group_);
  }
  const auto choose_for = [&](int m, Scratch* helper) {
    choose(t.members[m].wanted, &t.scores[m * group_ * t.stride], t.stride, t.members[m].at.count,
           &t.chosen[m * t.stride], helper);
  };
  s->busy_ns -= s->stage.run(bundle.count, s, choose_for);
  return std::max(ranked - 1, 0) * bytes;
}

// The tiles of the shared blocks that members chose, in bytes.
Engine::SharedTiles Engine::shared_tiles(const Bundle& bundle, const Scratch* s) const {
  const Together& t = s->together;
  const Member& first = t.members[0];
  const Blocks at = first.at.part(0, shared_blocks(first.at, bundle.end_page));
  SharedTiles tiles;
  for (int i = 0; i < at.count; ++i) {
    int readers = 0;
    for (int m = 0; m < bundle.count; ++m) readers += t.chosen[m * t.stride + i] != 0;
    const int64_t bytes = (at.to(i) - at.from(i)) * shape_.tile_bytes();
    tiles.apart += readers * bytes;
    if (readers != 0) tiles.once += bytes;
  }
  return tiles;
}

// Whether one pass over these for the heads of all members takes less than a pass of each: on average over
// the members, who may want very different shares.
bool Engine::attends_together(const Bundle& bundle, const SharedTiles& tiles) const {
  if (tiles.apart >= kAgreed * bundle.count * tiles.once) return tiles.once != 0;
  const bool matrices = kernels_.matrix_depth != 0 && shape_.head_dim % kernels_.matrix_depth == 0 &&
                        bundle.count * group_ > kVectorHeads;
  return (matrices || tiles.once > config_.cached_bytes) && tiles.apart >= kReaders * tiles.once;
}

// The pages of the shared blocks that anyone reads, with masks for the heads of all members unless every head
// wants every page.
Selection Engine::list_shared(const Bundle& bundle, Scratch* s) const {
  Together& t = s->together;
  const Member& first = t.members[0];
  const Blocks at = first.at.part(0, shared_blocks(first.at, bundle.end_page));
  const int32_t* pages = pages_of(first.task.request);
  const int heads = bundle.count * group_;
  const uint16_t everyone = static_cast<uint16_t>((1u << group_) - 1);
  const auto wanted = [&](uint16_t chosen) {
    return config_.attend_union && chosen != 0 ? everyone : chosen;
  };
  uint16_t* anyone = s->chosen.data();
  std::copy_n(t.chosen.data(), at.count, anyone);
  for (int m = 1; m < bundle.count; ++m) {
    for (int i = 0; i < at.count; ++i) anyone[i] |= t.chosen[m * t.stride + i];
  }
  Selection out;
  for (int m = 0; m < bundle.count; ++m) {
    Selection& chose = t.members[m].chose;
    for (int i = 0; i < at.count; ++i) {
      const uint16_t bits = wanted(t.chosen[m * t.stride + i]);
      out.masked |= anyone[i] != 0 && bits != everyone;
      if (bits == 0) continue;
      const int count = at.to(i) - at.from(i);
      chose.tokens += static_cast<int64_t>(count) * kPage * std::popcount(bits);
      chose.reads.tile_bytes += count * shape_.tile_bytes();
    }
  }
  for (int i = 0; i < at.count; ++i) {
    if (anyone[i] == 0) continue;
    const int from = at.from(i), count = at.to(i) - from;
    std::copy_n(pages + from, count, &t.pages[out.count]);
    if (out.masked) {
      uint16_t* masks = &t.masks[out.count * heads];
      for (int m = 0; m < bundle.count; ++m, masks += group_) {
        const uint16_t bits = wanted(t.chosen[m * t.stride + i]);
        for (int g = 0; g < group_; ++g) masks[g] = static_cast<uint16_t>(-(bits >> g & 1));
      }
      for (int p = 1; p < count; ++p, masks += heads) std::copy_n(masks - heads, heads, masks);
    }
    out.count += count;
  }
  out.reads.tile_bytes = out.count * shape_.tile_bytes();
  return out;
}

// What member m reads alone, all of it or what it did not read together with the others, which is merged with
// it.
void Engine::finish_member(const Bundle& bundle, int m, bool together, bool near, Scratch* s) {
  Together& t = s->together;
  Member& member = t.members[m];
  const Task& task = member.task;
  const int G = group_, D = shape_.head_dim;
  const int shared = together ? shared_blocks(member.at, bundle.end_page) : 0;
  const uint16_t* chosen = &t.chosen[m * t.stride];
  Selection more;
  list_pages(member.at.part(shared, member.at.count), pages_of(task.request), chosen + shared, s, &more);
  more.near = near;
  const int64_t at = state_at(task.request, task.head);
  attend(task, more, s, &mid_o_[at * D], &mid_lse_[at]);
  if (together) {
    for (int g = 0; g < G; ++g) {
      float* mid = &mid_o_[(at + g) * D];
      mid_lse_[at + g] =
          exact_.merge_state(mid, mid_lse_[at + g], &t.o[(m * G + g) * D], t.lse[m * G + g], D, mid);
    }
  }
  member.chose.tokens += more.tokens;
  member.chose.reads.tile_bytes += more.reads.tile_bytes;
  if (config_.guard > 0 && member.wanted.ranked != 0) {
    const int64_t stride = static_cast<int64_t>(s->scores.size()) / G;
    for (int g = 0; g < G; ++g)
      std::copy_n(&t.scores[(m * G + g) * t.stride], member.at.count, &s->scores[g * stride]);
    std::copy_n(chosen, member.at.count, s->chosen.data());
  }
  finish_task(task, member.chose, s);
}

}  // namespace fluxion
