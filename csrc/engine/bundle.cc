#include "engine/bundle.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/chunks.h"

namespace fluxion {

namespace {

// Heads that want different tiles slow one another down when they attend together (kernels/attend.h,
// attend_lanes.h). This costs more than a tile load from a cache, and more than one from memory if few heads
// want the tile. So members attend together only if a tile has enough readers on average. If the last-level
// cache keeps the tiles for the next member, the share kAgreed of the members must read a tile. Otherwise,
// and if a matrix unit multiplies all heads with a tile at once, kReaders members must. That unit also rounds
// weights far less than the other kernels for many heads.
constexpr double kAgreed = 0.9, kReaders = 3;
// With this many readers, an earlier member has read most of what a member reads.
constexpr double kNearReaders = 2;

// Number of blocks of a middle before the page where the shared part ends.
int shared_blocks(const Blocks& at, int end_page) { return (end_page >> at.level) - at.first; }

}  // namespace

struct BundleRun::Member {
  Task task;
  Blocks at;
  Wanted wanted;
  Selection chose;  // its reads as if it were alone
};

struct BundleRun::Room : OwnScratch {
  std::vector<Member> members;
  int64_t stride;                // blocks of the longest member
  std::vector<char> queries;     // [heads][D] KV dtype
  std::vector<float> scores;     // [heads][stride]
  std::vector<uint16_t> chosen;  // [members][stride]: heads of the member's group
  std::vector<int32_t> pages;    // pages of the shared blocks
  std::vector<uint16_t> masks;   // [pages][heads]
  std::vector<float> o, lse;     // [heads][D], [heads]
};

void Bundles::reserve(int requests, int kv_heads) {
  const size_t groups = static_cast<size_t>(requests) * kv_heads;
  tasks_.reserve(groups);
  all_.reserve(groups);
  of_.resize(groups);
  families_.reserve(requests);
  middle_ends_.resize(requests);
}

void Bundles::begin_step(const Layer& layer, std::vector<Scratch>* scratch) {
  all_.clear();
  families_.clear();
  if (!layer.config.share_prefixes) return;
  const Step& step = layer.step;
  const int batch = step.batch(), together = kMaxHeads / layer.group;
  for (int b = 0; b < batch; ++b) middle_ends_[b] = step.request(b).good ? step.request(b).window_page : 0;
  families_.find(step.table(), step.max_pages(), step.sink_pages(),
                 {middle_ends_.data(), static_cast<size_t>(batch)}, together);
  size_t members = 0, pages = 0;
  for (const Family& family : families_.all()) {
    members = std::max<size_t>(members, std::min(family.count, together));
    for (const int32_t b : families_.members(family)) pages = std::max<size_t>(pages, middle_ends_[b]);
  }
  for (Scratch& s : *scratch) BundleRun::reserve(layer, members, pages, &s);
}

// Adds bundles of the tasks from `first` on: as few as possible, of nearly equal size.
void Bundles::add(const Layer& layer, int first, int end_page) {
  const int together = kMaxHeads / layer.group, tasks = static_cast<int>(tasks_.size()) - first;
  const int bundles = (tasks + together - 1) / together;
  for (int n = 0; n < bundles; ++n) {
    const int begin = first + tasks * n / bundles, end = first + tasks * (n + 1) / bundles;
    if (end - begin < 2) continue;
    float value = 0;
    for (int i = begin; i < end; ++i) {
      value += layer.plan->value[tasks_[i]];
      of_[tasks_[i]] = static_cast<int32_t>(all_.size());
    }
    all_.push_back({tasks_.data() + begin, end - begin, end_page, value});
  }
}

void BundleRun::reserve(const Layer& layer, size_t members, size_t pages, Scratch* s) {
  const size_t heads = members * layer.group;
  Room& room = s->own<Room>();
  const auto grow = [](auto* v, size_t size) { v->resize(std::max(v->size(), size)); };
  room.members.reserve(members);
  grow(&room.queries, heads * layer.shape.token_bytes());
  grow(&room.scores, heads * pages);
  grow(&room.chosen, members * pages);
  grow(&room.pages, pages);
  grow(&room.masks, heads * pages);
  grow(&room.o, heads * layer.shape.head_dim);
  grow(&room.lse, heads);
  s->reserve_parts(heads, layer.shape.head_dim);
}

BundleRun::BundleRun(const Layer& layer, const Bundle& bundle, Scratch* s)
    : layer_(layer),
      bundle_(bundle),
      s_(s),
      room_(s->own<Room>()),
      everyone_(static_cast<uint16_t>((1u << layer.group) - 1)) {
  gather();
  const int64_t saved_metadata = select();
  int64_t saved_tiles = 0;
  const SharedTiles tiles = shared_tiles();
  together_ = attends_together(tiles);
  near_ = !together_ && tiles.once > 0 && tiles.once <= layer.config.cached_bytes &&
          tiles.apart >= kNearReaders * tiles.once;
  if (together_) {
    const Selection shared = list_shared();
    saved_tiles = -shared.reads.tile_bytes;
    for (const Member& member : room_.members) saved_tiles += member.chose.reads.tile_bytes;
    attend(layer, room_.queries.data(), bundle.count * layer.group, room_.members[0].task.head, shared,
           room_.pages.data(), room_.masks.data(), s, room_.o.data(), room_.lse.data());
  }
  // Every task has counted its reads as if it ran alone; subtract what sharing saved.
  s->stats[kStatTileBytes] -= saved_tiles;
  s->stats[kStatMetadataBytes] -= saved_metadata;
  s->stats[kStatSharedTileBytes] += saved_tiles;
  s->stats[kStatSharedMetadataBytes] += saved_metadata;
  s->stats[kStatSharedTasks] += bundle.count;
}

Task BundleRun::task(int m) const { return room_.members[m].task; }

// Collects members and queries, those that choose by scores first: a scan covers leading heads.
void BundleRun::gather() {
  const size_t bytes = layer_.group * layer_.shape.token_bytes();
  room_.members.clear();
  room_.stride = 0;
  for (const bool ranked : {true, false}) {
    for (int i = 0; i < bundle_.count; ++i) {
      const Task task = layer_.task(bundle_.tasks[i]);
      const Blocks at = blocks_of(layer_, task);
      const Wanted wanted = wanted_blocks(layer_, task, at);
      if ((wanted.ranked != 0) != ranked) continue;
      std::memcpy(&room_.queries[room_.members.size() * bytes], layer_.query(task), bytes);
      room_.stride = std::max<int64_t>(room_.stride, at.count);
      room_.members.push_back({task, at, wanted, {}});
    }
  }
}

// Selects over the whole middle of every member. Returns the bytes of metadata that sharing saved.
int64_t BundleRun::select() {
  const int G = layer_.group;
  // Scans blocks [begin, end) of member m for its heads and those of the members after it.
  const auto scan = [&](int m, int begin, int end, int heads) -> int64_t {
    if (begin == end || heads == 0) return 0;
    const Member& member = room_.members[m];
    const int64_t first = m * G;
    return score_blocks(layer_, member.task, member.at.part(begin, end),
                        &room_.queries[first * layer_.shape.token_bytes()], heads, layer_.pool.spread(),
                        &room_.scores[first * room_.stride + begin], room_.stride, s_);
  };
  int ranked = 0;
  while (ranked < bundle_.count && room_.members[ranked].wanted.ranked != 0) ++ranked;
  const int shared = shared_blocks(room_.members[0].at, bundle_.end_page);
  const int64_t bytes = scan(0, 0, shared, ranked * G);
  for (int m = 0; m < bundle_.count; ++m) {
    Member& member = room_.members[m];
    if (m < ranked) member.chose.reads.metadata_bytes = bytes + scan(m, shared, member.at.count, G);
  }
  const auto choose_for = [&](int m, Scratch* helper) {
    choose_blocks(layer_, room_.members[m].wanted, &room_.scores[m * G * room_.stride], room_.stride,
                  room_.members[m].at.count, &room_.chosen[m * room_.stride], helper);
  };
  s_->busy_ns -= s_->stage.run(bundle_.count, s_, choose_for);
  return std::max(ranked - 1, 0) * bytes;
}

// The blocks that all members share.
Blocks BundleRun::shared() const {
  const Blocks& at = room_.members[0].at;
  return at.part(0, shared_blocks(at, bundle_.end_page));
}

// Bytes of the tiles of the shared blocks that members chose.
BundleRun::SharedTiles BundleRun::shared_tiles() const {
  const Blocks at = shared();
  SharedTiles tiles;
  for (int i = 0; i < at.count; ++i) {
    int readers = 0;
    for (int m = 0; m < bundle_.count; ++m) readers += room_.chosen[m * room_.stride + i] != 0;
    const int64_t bytes = (at.to(i) - at.from(i)) * layer_.shape.tile_bytes();
    tiles.apart += readers * bytes;
    if (readers != 0) tiles.once += bytes;
  }
  return tiles;
}

// Whether one pass over these tiles for the heads of all members is faster than one pass for each member. It
// judges by the average over the members, whose shares may differ widely.
bool BundleRun::attends_together(const SharedTiles& tiles) const {
  if (tiles.apart >= kAgreed * bundle_.count * tiles.once) return tiles.once != 0;
  const int depth = layer_.kernels.matrix_depth;
  const bool matrices =
      depth != 0 && layer_.shape.head_dim % depth == 0 && bundle_.count * layer_.group > kVectorHeads;
  return (matrices || tiles.once > layer_.config.cached_bytes) && tiles.apart >= kReaders * tiles.once;
}

// Lists the pages of the shared blocks that any member reads, with masks for the heads of all members, unless
// every head reads every page.
Selection BundleRun::list_shared() {
  const Blocks at = shared();
  const int32_t* pages = layer_.pages(room_.members[0].task);
  const int heads = bundle_.count * layer_.group;
  uint16_t* anyone = s_->chosen.data();
  std::copy_n(room_.chosen.data(), at.count, anyone);
  for (int m = 1; m < bundle_.count; ++m) {
    for (int i = 0; i < at.count; ++i) anyone[i] |= room_.chosen[m * room_.stride + i];
  }
  Selection out;
  for (int m = 0; m < bundle_.count; ++m) {
    Selection& chose = room_.members[m].chose;
    for (int i = 0; i < at.count; ++i) {
      const uint16_t bits = readers(room_.chosen[m * room_.stride + i]);
      out.masked |= anyone[i] != 0 && bits != everyone_;
      if (bits == 0) continue;
      const int count = at.to(i) - at.from(i);
      chose.tokens += static_cast<int64_t>(count) * kPage * std::popcount(bits);
      chose.reads.tile_bytes += count * layer_.shape.tile_bytes();
    }
  }
  for (int i = 0; i < at.count; ++i) {
    if (anyone[i] == 0) continue;
    const int from = at.from(i), count = at.to(i) - from;
    std::copy_n(pages + from, count, &room_.pages[out.count]);
    if (out.masked) mask_shared(at, i, &room_.masks[out.count * heads]);
    out.count += count;
  }
  out.reads.tile_bytes = out.count * layer_.shape.tile_bytes();
  return out;
}

// Writes the masks of the pages of shared block i: [pages][heads].
void BundleRun::mask_shared(const Blocks& at, int i, uint16_t* masks) const {
  const int G = layer_.group, heads = bundle_.count * G;
  for (int m = 0; m < bundle_.count; ++m, masks += G) {
    const uint16_t bits = readers(room_.chosen[m * room_.stride + i]);
    for (int g = 0; g < G; ++g) masks[g] = static_cast<uint16_t>(-(bits >> g & 1));
  }
  for (int p = at.from(i) + 1; p < at.to(i); ++p, masks += heads) std::copy_n(masks - heads, heads, masks);
}

Selection BundleRun::finish_member(int m) {
  Member& member = room_.members[m];
  const Task& task = member.task;
  const int G = layer_.group, shared = together_ ? shared_blocks(member.at, bundle_.end_page) : 0;
  const uint16_t* chosen = &room_.chosen[m * room_.stride];
  Selection more;
  list_blocks(layer_, member.at.part(shared, member.at.count), layer_.pages(task), chosen + shared, s_,
              &more);
  more.near = near_ && m > 0;
  float *o = layer_.middle_o(task), *lse = layer_.middle_lse(task);
  attend(layer_, task, more, s_, o, lse);
  if (together_) layer_.merge(G, o, lse, &room_.o[m * G * layer_.shape.head_dim], &room_.lse[m * G]);
  member.chose.tokens += more.tokens;
  member.chose.reads.tile_bytes += more.reads.tile_bytes;
  return member.chose;
}

}  // namespace fluxion
