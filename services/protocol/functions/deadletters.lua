-- Dead letters: put back what failed.
-- reads and writes: run, deadletter, ledger, outstanding, group:<group>, trained:<epoch>, drops, drops:order
-- owns:             requeued         zset  ids of tickets taken from the dead letters, in the order in which they wait to be issued again
--                   requeued:letters zset  "<entry> <ticket>" of the last that were put back, all of score 0

-- Nil when the ticket of a dead letter may be issued again, else the reason why not.
local function objection(prefix, letter)
  local ticket = letter.ticket or ''
  local epoch, index = string.match(ticket, '^(%d+)-(%d+)$')
  if letter.outcome ~= 'failed' then return 'its ticket was not under way when it came, or trained before: it never counted as failed' end
  if not epoch or #epoch > 9 or #index > 9 then return 'its ticket id is not of the form <epoch>-<row>' end
  if redis.call('ZSCORE', prefix .. ':outstanding', ticket) then return 'its ticket is under way again' end
  if redis.call('ZSCORE', prefix .. ':requeued', ticket) then return 'its ticket waits to be issued again already' end
  if redis.call('EXISTS', prefix .. ':group:' .. ticket) == 1 then return 'its group is in the replay table or in a step' end
  if redis.call('GETBIT', prefix .. ':trained:' .. epoch, index) == 1 then return 'its prompt was trained' end
end

local function read_letter(prefix, id)
  local found = redis.pcall('XRANGE', prefix .. ':deadletter', id, id) -- the id may be any text
  if found.err or #found == 0 or found[1][1] ~= id then return end
  local fields, letter = found[1][2], {}
  for i = 1, #fields, 2 do letter[fields[i]] = fields[i + 1] end
  return letter
end

-- The ticket of a dead letter that is gone because it was put back; nil where that is not known.
local function put_back_before(prefix, id)
  local found = redis.call('ZRANGE', prefix .. ':requeued:letters', '[' .. id .. ' ', '[' .. id .. ' \255', 'BYLEX', 'LIMIT', 0, 1)
  return found[1] and string.sub(found[1], #id + 2)
end

-- args: entries of the dead-letter stream. Each that was counted as failed and whose ticket is nowhere else leaves the stream and
-- waits to be issued again. Returns {entry, ticket, refusal, 1 if an earlier call put it back, …}; an empty refusal says that it was
-- put back. A repeated call changes nothing.
register('requeue', function(prefix, args)
  local refusal = busy(prefix)
  if refusal then return refusal end
  local ended = redis.call('HMGET', prefix .. ':run', 'finished', 'stopping')
  local over = (ended[1] or ended[2]) and 'the run is over: ' .. (ended[1] or ended[2])
  local reply, put_back = {}, 0
  local last = tonumber(redis.call('ZRANGE', prefix .. ':requeued', -1, -1, 'WITHSCORES')[2] or -1)
  for _, id in ipairs(args) do
    local letter = read_letter(prefix, id)
    local before = not letter and put_back_before(prefix, id)
    local why = over or letter and objection(prefix, letter)
    if not why and not letter and not before then why = 'there is no such dead letter: it was put back long ago, or trimmed' end
    if letter and not why then
      redis.call('XDEL', prefix .. ':deadletter', id)
      redis.call('HDEL', prefix .. ':drops', letter.ticket)
      redis.call('ZREM', prefix .. ':drops:order', letter.ticket)
      put_back = put_back + 1
      redis.call('ZADD', prefix .. ':requeued', last + put_back, letter.ticket)
      redis.call('ZADD', prefix .. ':requeued:letters', 0, id .. ' ' .. letter.ticket)
    end
    for _, part in ipairs({id, letter and letter.ticket or before or '', why or '', before and 1 or 0}) do reply[#reply + 1] = part end
  end
  if put_back > 0 then
    redis.call('ZREMRANGEBYRANK', prefix .. ':requeued:letters', 0, -DROPS_KEPT - 1)
    count(prefix, 'failed', -put_back)
    ring(prefix, 'slots')
  end
  return reply
end)
